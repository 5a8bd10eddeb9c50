"""The cache: where tokens sit (CacheIndex), the arrays (Pools), who owns which slot (Slots), both (Store)."""

from mlx_transmuter.cache.block_manager import BlockManager
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.hybrid_index import HybridIndex
from mlx_transmuter.cache.index import CacheIndex
from mlx_transmuter.cache.kv_cache import KVCache, PoolSpec
from mlx_transmuter.cache.pools import Pools
from mlx_transmuter.cache.quantized_pool import QuantizedFormat, QuantizedPool

__all__ = [
    "BlockManager",
    "CacheError",
    "CacheIndex",
    "HybridIndex",
    "KVCache",
    "PoolSpec",
    "Pools",
    "QuantizedFormat",
    "QuantizedPool",
]
