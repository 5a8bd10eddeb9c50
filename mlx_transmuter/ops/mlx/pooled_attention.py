"""Attention over the pools of a cache: what the converter makes of a graph's past, present, mask and softmax.

`index` is a CacheIndex; `lanes` is the same index over pools that keep the heads apart (`CacheIndex.heads`). Where
layers differ in what they see, both are Layered.
"""

from typing import Any

import mlx.core as mx

from mlx_transmuter.cache import HybridIndex, QuantizedPool
from mlx_transmuter.ops.functional.exponential import softmax_numerator_and_sum
from mlx_transmuter.ops.mlx.quantized_pool_products import (
    MAX_TOKENS_WITHOUT_DEQUANTIZING,
    quantized_scores,
    quantized_weighted_sum,
)
from mlx_transmuter.ops.registry import op


@op("mlx.visible")
def visibility_mask(index, *, window: int = 0):
    """Which columns each token sees: bool [rows, 1, seq, context]. window: of the last so many positions; 0: all."""
    return (index.window(window) if window else index).visible()


@op("mlx.positions")
def token_positions(index):
    """The positions of the step's tokens, int32 [rows, seq]; padding has position 0."""
    return index.positions()


@op("mlx.alibi")
def add_alibi_bias(index, mask, *, slopes):
    """seen [rows, 1, seq, context] as an additive mask [rows, heads, seq, context] with a slope per head on the
    distance.

    Press et al. 2022. The distance is that of positions: the column's minus the token's.
    """
    index = _layer_index(index, mask)
    distance = (index.column_positions()[:, None] - index.positions()[:, :, None])[:, None].astype(mx.float32)
    bias = mx.array(slopes, mx.float32)[:, None, None] * distance
    # The lowest number, not -inf: the row of a padding token sees nothing, and must not become NaN.
    return mx.where(mask, bias, mx.array(mx.finfo(mx.float32).min, mx.float32))


@op("mlx.attention")
def attend_over_pools(
    q, k, v, key_pool, value_pool, head_index, mask, sinks=None, *, scale: float, softcap: float = 0.0, merge: int = 0
):
    """Attention of q over what the cache holds, this step's k and v included: (output, keys', values').

    q [rows, heads, seq, dim]; k, v [rows, kv, seq, dim]; keys, values: pools [kv · slots, dim], or PackedPools. Without
    values, keys is one pool of both, [2 kv · slots, dim], lanes are those over both (`CacheIndex.twice`), (output,
    keys') comes back, and without v, k has both, the heads of v after its own. seen: bool [rows, 1, seq, context] or an
    additive mask [rows, heads, seq, context]. sinks [heads]: a score of no column in each softmax. softcap: scores
    become c · tanh(score / c). The output is [rows, heads, seq, dim], with merge [rows, seq, heads · dim]; heads share
    the keys of heads / kv heads. q may come as [rows · heads, seq, dim]; so does the output then, without merge.
    """
    head_index = _layer_index(head_index, mask)
    rows, kv, seq, dim = k.shape
    kv = kv if v is not None else kv // 2
    flat = q.ndim == 3
    heads = q.shape[0] // rows if flat else q.shape[1]
    packed = all(isinstance(pool, QuantizedPool) for pool in (key_pool, value_pool) if pool is not None)
    packed = packed and _multiplies_quantized(seq)
    if value_pool is None:
        k, v, *pools = _extend_shared_pool(k, v, key_pool, head_index, packed)
    else:
        k, key_pool = _extend_pool(head_index, k, key_pool, packed)
        v, value_pool = _extend_pool(head_index, v, value_pool, packed)
        pools = (key_pool, value_pool)
    mask = mask if mask.dtype == mx.bool_ else mask.astype(q.dtype)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    if softcap or packed or not _has_attention_kernel():
        out = _unfused_attention(q.reshape(rows * kv, -1, dim), k, v, mask, sinks, scale, softcap, (rows, heads, seq))
    else:
        k, v = (held.reshape(rows, kv, -1, held.shape[2]) for held in (k, v))
        q = q.reshape(rows, heads, seq, dim)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if merge and seq > 1:
        out = out.reshape(rows, heads, seq, -1).swapaxes(1, 2)
    shape = (rows, seq, -1) if merge else (rows * heads, seq, -1) if flat else (rows, heads, seq, -1)
    return out.reshape(shape), *pools


def _layer_index(index, mask):
    """The index by which a layer with the mask `seen` reads."""
    return index.index_for(mask.shape[-1]) if isinstance(index, HybridIndex) else index


def _extend_shared_pool(k, v, pool, lanes, packed: bool) -> tuple[Any, ...]:
    """What the cache holds of keys and of values in one pool, k and v included, each [rows · kv, context, dim] or
    packed, and the pool.
    """
    if v is None and len(k) > 1:
        k, v = mx.split(k, 2, axis=1)
    held, pool = _extend_pool(lanes, k if v is None else mx.concatenate([k, v]), pool, packed)
    if isinstance(held, QuantizedPool):
        return *(held._replace(rows=rows) for rows in mx.split(held.rows, 2)), pool
    return *mx.split(held, 2), pool


def _extend_pool(lanes, values, pool, quantized: bool = False) -> tuple[Any, Any]:
    """lanes.extend of values [rows, heads, seq, dim]: (seen, pool'); what is seen of a PackedPool unpacked, or not."""
    # The pools of a run are its own and hold no NaN, so columns that nobody sees needn't be made zero.
    if isinstance(pool, QuantizedPool):
        return (pool.extend_quantized if quantized else pool.extend)(lanes, values, zero_unseen=False)
    # A module may have been cast since its pools got their type.
    return lanes.extend(values.astype(pool.dtype), pool, zero_unseen=False)


def _has_attention_kernel() -> bool:
    """Whether mx.fast has a kernel of attention; on the CPU it multiplies each key once for every query that shares
    it."""
    return mx.default_device() != mx.cpu


def _multiplies_quantized(seq: int) -> bool:
    """Whether the device multiplies packed keys and values faster than it unpacks them, in a step of so many tokens.

    The CPU never does.
    """
    return _has_attention_kernel() and seq <= MAX_TOKENS_WITHOUT_DEQUANTIZING


def _unfused_attention(q, k, v, mask, sinks, scale: float, softcap: float, sizes: tuple[int, int, int]):
    """Attention written out, one product for all the query heads that share a key's head.

    q: [rows · kv, queries, dim], as is the output; k, v: [rows · kv, context, dim], or both packed. sizes: (rows,
    heads, seq).
    """
    packed = isinstance(k, QuantizedPool)
    if q.dtype != mx.float32:  # whose kernel for the mask scales the scores for nothing; others may not hold them
        q, scale = q * scale, 1.0
    if packed:
        scores = quantized_scores(q, k) * scale
    elif q.shape[1] <= 4 and k.shape[1] >= 512:  # BLAS copies the right side, so that is the short one
        scores = (k @ q.swapaxes(1, 2)).swapaxes(1, 2) * scale
    else:
        scores = q @ k.swapaxes(1, 2) * scale
    if softcap:
        scores = mx.tanh(scores * (1 / softcap)) * softcap
    shape = scores.shape
    if mask.shape[:3] == (1, 1, 1):  # one token sees the same in all heads
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
    out = quantized_weighted_sum(weights, v) if packed else weights @ v
    return out if sums is None else out / sums.reshape(*out.shape[:2], 1)


@op("mlx.last")
def take_tokens(x, token_indices):
    """x [rows, seq, dim] at the tokens ends, int32 [rows, k], of each row: [rows, k, dim]."""
    if x.shape[1] == token_indices.shape[1] == 1:
        return x
    return mx.take_along_axis(x, mx.broadcast_to(token_indices[:, :, None], (*token_indices.shape, x.shape[2])), axis=1)
