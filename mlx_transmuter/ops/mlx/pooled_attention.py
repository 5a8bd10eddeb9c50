"""Attention over the pools of a cache, which replaces a graph's attention over past and present.

`index` is a CacheIndex; `head_index` is the same index over pools that keep heads apart (`CacheIndex.for_heads`). In a
model of which only some layers have a window, both are HybridIndex.
"""

from typing import Any

import mlx.core as mx

from mlx_transmuter.cache import QuantizedPool
from mlx_transmuter.ops.functional.attention import cap_scores, finite_mask
from mlx_transmuter.ops.functional.exponential import softmax_numerator_and_sum
from mlx_transmuter.ops.functional.kernels import fused_attention
from mlx_transmuter.ops.mlx.cache_masks import layer_index
from mlx_transmuter.ops.mlx.quantized_pool_products import (
    MAX_TOKENS_WITHOUT_DEQUANTIZING,
    quantized_scores,
    quantized_weighted_sum,
)
from mlx_transmuter.ops.registry import op


@op("mlx.attention")
def attend_over_pools(
    q, k, v, key_pool, value_pool, head_index, mask, sinks=None, *, scale: float, softcap: float = 0.0, merge: int = 0
):
    """Stores this step's k and v in the pools and attends over the cache: (output, key_pool', value_pool').
    `merge`, if not 0: the output has its heads merged, [rows, seq, heads · dim], else it is [rows, heads, seq, dim].

    q [rows, heads, seq, dim]; k, v [rows, kv, seq, dim]; key_pool, value_pool [kv · slots, dim], or QuantizedPools. kv
    heads share their keys and values among heads / kv heads each. Without value_pool, key_pool holds the values after
    the keys, [2 kv · slots, dim], head_index is over both (`CacheIndex.for_key_value_pool`), and the result is (output,
    key_pool'); without v, k has the heads of v after its own. mask: bool [rows, 1, seq, context], or additive [rows,
    heads, seq, context]. sinks [heads]: the score of an attention sink in each softmax. softcap: scores become
    softcap · tanh(score / softcap). q may be [rows · heads, seq, dim]; the output then is too, without merge.
    """
    head_index = layer_index(head_index, mask)
    rows, kv, seq, dim = k.shape
    kv = kv if v is not None else kv // 2
    is_flat = q.ndim == 3
    heads = q.shape[0] // rows if is_flat else q.shape[1]
    is_quantized = all(isinstance(pool, QuantizedPool) for pool in (key_pool, value_pool) if pool is not None)
    stay_quantized = is_quantized and _multiplies_quantized(seq)
    if value_pool is None:
        k, v, *pools = _extend_key_value_pool(head_index, k, v, key_pool, stay_quantized)
    else:
        k, key_pool = _extend_pool(head_index, k, key_pool, stay_quantized)
        v, value_pool = _extend_pool(head_index, v, value_pool, stay_quantized)
        pools = (key_pool, value_pool)
    mask = mask if mask.dtype == mx.bool_ else finite_mask(mask, q.dtype)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    if softcap or stay_quantized or not _has_attention_kernel():
        sizes = (rows, heads, seq)
        q = q.reshape(rows * kv, -1, dim)
        out = _unfused_attention(q, k, v, mask, sinks, scale=scale, softcap=softcap, sizes=sizes)
    else:
        k, v = (seen.reshape(rows, kv, -1, seen.shape[2]) for seen in (k, v))
        q = q.reshape(rows, heads, seq, dim)
        out = fused_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if merge and seq > 1:
        out = out.reshape(rows, heads, seq, -1).swapaxes(1, 2)
    if merge:
        return out.reshape(rows, seq, -1), *pools
    return out.reshape(*((rows * heads,) if is_flat else (rows, heads)), seq, -1), *pools


def _extend_key_value_pool(head_index, k, v, pool, stay_quantized: bool) -> tuple[Any, ...]:
    """Stores k and v in one pool of both: (keys, values, pool'), keys and values [rows · kv, context, dim] or
    quantized.
    """
    if v is None and len(k) > 1:
        k, v = mx.split(k, 2, axis=1)
    seen, pool = _extend_pool(head_index, k if v is None else mx.concatenate([k, v]), pool, stay_quantized)
    if isinstance(seen, QuantizedPool):
        return *(seen._replace(rows=rows) for rows in mx.split(seen.rows, 2)), pool
    return *mx.split(seen, 2), pool


def _extend_pool(head_index, values, pool, stay_quantized: bool = False) -> tuple[Any, Any]:
    """head_index.extend of values [rows, heads, seq, dim]: (seen, pool'), seen dequantized unless stay_quantized."""
    # A session's pools hold no NaN, so columns that no token attends to need not be zero.
    if isinstance(pool, QuantizedPool):
        return (pool.extend_quantized if stay_quantized else pool.extend)(head_index, values, zero_unseen=False)
    # A module may have been cast since its pools were made.
    return head_index.extend(values.astype(pool.dtype), pool, zero_unseen=False)


def _has_attention_kernel() -> bool:
    """Whether mx.fast.scaled_dot_product_attention has a kernel on the device. On the CPU it has none, and multiplies a
    key once for each query head that shares it."""
    return mx.default_device() != mx.cpu


def _multiplies_quantized(seq: int) -> bool:
    """Whether the device multiplies quantized keys and values faster than it dequantizes them, in a step of that many
    tokens. The CPU never does.
    """
    return _has_attention_kernel() and seq <= MAX_TOKENS_WITHOUT_DEQUANTIZING


def _unfused_attention(q, k, v, mask, sinks, *, scale: float, softcap: float, sizes: tuple[int, int, int]):
    """Attention as separate operations, with one product for all the query heads that share a key head.

    q: [rows · kv, queries, dim], as is the output; k, v: [rows · kv, context, dim], or both quantized. sizes: (rows,
    heads, seq).
    """
    # In float32 the kernel that applies the mask also scales the scores at no cost. A half type may not hold unscaled
    # scores, so there the queries are scaled.
    if q.dtype != mx.float32:
        q, scale = q * scale, 1.0
    scores = cap_scores(_scores(q, k) * scale, softcap)
    shape = scores.shape
    if mask.shape[:3] == (1, 1, 1):  # one token, with the same mask in all heads
        mask = mask.squeeze(0)
    else:
        scores = scores.reshape(*sizes, -1)
    lowest = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
    scores = mx.where(mask, scores, lowest) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        sinks = mx.broadcast_to(sinks[:, None, None], (*sizes, 1))
        scores = mx.concatenate([scores.reshape(*sizes, -1), sinks], axis=-1)
    weights, sums = softmax_numerator_and_sum(scores)
    weights = weights if sinks is None else weights[..., :-1]
    weights = weights.reshape(shape)
    out = quantized_weighted_sum(weights, v) if isinstance(v, QuantizedPool) else weights @ v
    return out if sums is None else out / sums.reshape(*out.shape[:2], 1)


def _scores(q, k):
    """q [n, queries, dim] · k [n, context, dim] transposed, or k quantized: [n, queries, context]."""
    if isinstance(k, QuantizedPool):
        return quantized_scores(q, k)
    # The BLAS of the CPU copies the right side of a product, so it is the short one.
    if not _has_attention_kernel() and q.shape[1] <= 4 and k.shape[1] >= 512:
        return (k @ q.swapaxes(1, 2)).swapaxes(1, 2)
    return q @ k.swapaxes(1, 2)
