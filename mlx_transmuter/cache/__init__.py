"""The cache of a decoder: where tokens are (CacheIndex), the arrays (Pools), which sequence owns which slots
(BlockManager), and both together (KVCache).
"""

from mlx_transmuter.cache.block_manager import BlockManager
from mlx_transmuter.cache.errors import CacheError, CacheFullError
from mlx_transmuter.cache.hybrid_index import HybridIndex
from mlx_transmuter.cache.index import CacheIndex
from mlx_transmuter.cache.kv_cache import KVCache, PoolSpec
from mlx_transmuter.cache.pools import Pools
from mlx_transmuter.cache.quantized_pool import QuantizedFormat, QuantizedPool, check_quantization

__all__ = [
    "BlockManager",
    "CacheError",
    "CacheFullError",
    "CacheIndex",
    "HybridIndex",
    "KVCache",
    "PoolSpec",
    "Pools",
    "QuantizedFormat",
    "QuantizedPool",
    "check_quantization",
]
