"""The cache: where tokens sit (CacheIndex), the arrays they sit in (Pools) and who owns which slot (Slots)."""

from mlx_transmuter.cache.error import CacheError
from mlx_transmuter.cache.index import CacheIndex
from mlx_transmuter.cache.pool import Pools
from mlx_transmuter.cache.slots import Slots

__all__ = ["CacheError", "CacheIndex", "Pools", "Slots"]
