"""Attention and rotary positions of ONNX's own domain (opset 23 on)."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.onnx.casting import device_dtype_of_code, saturating_cast
from mlx_transmuter.ops.registry import OperatorError, op
from mlx_transmuter.ops.types import to_device


def split_heads(x: mx.array, heads: int | None) -> mx.array:
    """x [batch, tokens, heads * dim] as [batch, heads, tokens, dim]; one of four axes as it is."""
    if x.ndim == 4:
        return x
    if not heads:
        raise OperatorError(
            f"x {list(x.shape)} without a number of heads", "q_num_heads and kv_num_heads beside 3 axes"
        )
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """x [batch, heads, tokens, dim] as [batch, tokens, heads * dim]."""
    batch, heads, tokens, dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * dim)


@op("Attention-23")
def attention(
    q,
    k,
    v,
    mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    right_window_size=-1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
    outputs=1,
):
    """softmax(softcap(q k^T * scale) + mask) v; then the keys, the values and the scores if asked for.

    q [batch, heads, queries, dim] or [batch, queries, heads * dim], k and v likewise with kv heads; past_* [batch, kv
    heads, past, dim] go before them. mask bool (true: seen) or float (added), broadcast to [batch, heads, queries,
    columns], short ones not seen at the end. nonpad_kv_seqlen integers [batch]: how many columns of each row are
    filled. Causal and windowed queries stand at the end of the past, or of the filled columns. A query that sees
    nothing gives zeros. ONNX Attention-23, 24, 25.
    """
    rank = q.ndim
    q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = mx.concatenate([past_key, k], axis=2), mx.concatenate([past_value, v], axis=2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    queries, columns = q.shape[2], k.shape[2]
    offset = past if nonpad_kv_seqlen is None else nonpad_kv_seqlen.reshape(-1, 1, 1, 1) - queries
    seen = _position_mask(queries, columns, offset, left_window_size, 0 if is_causal else right_window_size)
    # MLX's own causal mask, which needs no array, puts the last query at the last column.
    plain = bool(is_causal) and mask is None and nonpad_kv_seqlen is None and left_window_size < 0
    plain = plain and past + queries == columns
    if nonpad_kv_seqlen is not None:
        filled = mx.arange(columns) < nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        seen = filled if seen is None else seen & filled
    mask, guard = _merge_masks(mask, seen, columns, q.dtype)
    # Positions alone hide a whole row only where queries stand before the first column.
    guard = (
        guard
        or nonpad_kv_seqlen is not None
        or (left_window_size >= 0 and past + queries - 1 - left_window_size >= columns)
    )

    scores = None
    if outputs <= 3 and not softcap:
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal" if plain else mask)
        if guard and mask is not None:
            y = mx.where(_fully_masked_queries(mask), mx.zeros((), y.dtype), y)
    else:
        y, scores = _unfused_attention(q, k, v, mask, guard, scale, softcap, softmax_precision, qk_matmul_output_mode)
    return (merge_heads(y) if rank == 3 else y, k, v, scores)[:outputs]


def _position_mask(queries: int, columns: int, offset, left: int, right: int) -> mx.array | None:
    """Which columns each query sees by its place, bool [(batch, 1,) queries, columns]; None for all."""
    if left < 0 and right < 0:
        return None
    xp = np if isinstance(offset, int) else mx
    distance = xp.arange(columns)[None, :] - (xp.arange(queries)[:, None] + offset)
    seen = distance >= -left if left >= 0 else None
    if right >= 0:
        seen = distance <= right if seen is None else seen & (distance <= right)
    return to_device(seen) if isinstance(seen, np.ndarray) else seen


def _merge_masks(mask: mx.array | None, position_mask: mx.array | None, columns: int, dtype: mx.Dtype):
    """The mask with what positions hide: (bool or float or None, whether it may hide every column of a query)."""
    if mask is None:
        return position_mask, False
    if (missing := columns - mask.shape[-1]) > 0:
        filler = mx.array(False) if mask.dtype == mx.bool_ else mx.array(-mx.inf, mask.dtype)
        mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=filler)
    if mask.dtype != mx.bool_:
        mask = mask.astype(dtype)
        return (mask if position_mask is None else mx.where(position_mask, mask, mx.array(-mx.inf, dtype))), True
    return (mask if position_mask is None else mask & position_mask), True


def _fully_masked_queries(mask: mx.array) -> mx.array:
    """Which queries see no column at all, bool [..., queries, 1]."""
    if mask.dtype == mx.bool_:
        return mx.logical_not(mx.any(mask, axis=-1, keepdims=True))
    return mx.max(mask, axis=-1, keepdims=True) == -mx.inf


def _unfused_attention(q, k, v, mask, may_mask_whole_rows, scale, softcap, precision, score_stage):
    """Attention step by step, and its scores after the product (mode 0), softcap (1), mask (2) or softmax (3)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (mx.repeat(x, repeats, axis=1) if repeats > 1 else x for x in (k, v))
    scores = shown = (q * math.sqrt(scale)) @ (k * math.sqrt(scale)).swapaxes(-1, -2)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    shown = scores if score_stage == 1 else shown
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    shown = scores if score_stage == 2 else shown
    wide = scores if precision is None else saturating_cast(scores, device_dtype_of_code(precision))
    weights = mx.softmax(wide, axis=-1, precise=True).astype(q.dtype)
    if may_mask_whole_rows and mask is not None:
        weights = mx.where(_fully_masked_queries(mask), mx.zeros((), weights.dtype), weights)
    return weights @ v, weights if score_stage == 3 else shown


@op("RotaryEmbedding-23")
def rotary_embedding(x, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0):
    """The first rotary_embedding_dim (0: all) of each head's elements turned by their position's angles.

    x [batch, heads, tokens, dim] or [batch, tokens, heads * dim]; the caches [positions, half] with position_ids
    [batch, tokens], or [batch, tokens, half]. Pairs are elements i and i + half, or 2i and 2i + 1 if interleaved. ONNX
    RotaryEmbedding-23.
    """
    rank = x.ndim
    x = x.transpose(0, 2, 1, 3) if rank == 4 else x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)
    dim = rotary_embedding_dim or x.shape[-1]
    half = dim // 2
    cos, sin = (
        (cache if position_ids is None else mx.take(cache, position_ids, axis=0))[:, :, None, :half]
        for cache in (cos_cache, sin_cache)
    )
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    if interleaved:
        turned = mx.stack([real, imaginary], axis=-1).reshape(turned.shape)
    else:
        turned = mx.concatenate([real, imaginary], axis=-1)
    y = mx.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
    return y.transpose(0, 2, 1, 3) if rank == 4 else y.reshape(*y.shape[:2], -1)
