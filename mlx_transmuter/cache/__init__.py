"""The cache: where tokens sit (CacheIndex), the arrays (Pools), who owns which slot (Slots), both (Store)."""

from mlx_transmuter.cache.error import CacheError
from mlx_transmuter.cache.index import CacheIndex
from mlx_transmuter.cache.layered import Layered
from mlx_transmuter.cache.packing import PackedPool, Packing
from mlx_transmuter.cache.pool import Pools
from mlx_transmuter.cache.slots import Slots
from mlx_transmuter.cache.store import Kind, Store

__all__ = ["CacheError", "CacheIndex", "Kind", "Layered", "PackedPool", "Packing", "Pools", "Slots", "Store"]
