"""Attention and rotary positions of ONNX's own domain (opset 23 on)."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.attention import attention_scores, cap_scores, check_equal_lengths, weighted_values
from mlx_transmuter.ops.functional.heads import merge_heads, split_heads
from mlx_transmuter.ops.functional.indexing import take_rows
from mlx_transmuter.ops.functional.kernels import fused_attention
from mlx_transmuter.ops.functional.rotary import rotate_pairs
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.onnx.casting import saturating_cast
from mlx_transmuter.ops.registry import OperatorError, op
from mlx_transmuter.ops.types import device_dtype, to_device


def _as_heads(x: mx.array, heads: int | None) -> mx.array:
    """Returns x [batch, tokens, heads * dim] as [batch, heads, tokens, dim]; an x of four axes as it is."""
    if x.ndim == 4:
        return x
    if heads is None:
        raise OperatorError(
            f"x {list(x.shape)} without a number of heads", "q_num_heads and kv_num_heads beside 3 axes"
        )
    return split_heads(x, heads)


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
    """softmax(softcap(q k^T * scale) + mask) v; then the keys, the values and the scores.

    q [batch, heads, queries, dim] or [batch, queries, heads * dim], k and v likewise with kv heads; past_* [batch, kv
    heads, past, dim] go before them. mask bool (true: visible) or float (added), broadcast to [batch, heads, queries,
    columns]; columns past its end are hidden. nonpad_kv_seqlen integers [batch]: how many columns of each row are
    filled. For causal attention and windows the queries come at the end of the past, or of the filled columns. A query
    that sees no column gives zeros. ONNX Attention-23, 24, 25.
    """
    rank = q.ndim
    q, k, v = _as_heads(q, q_num_heads), _as_heads(k, kv_num_heads), _as_heads(v, kv_num_heads)
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = mx.concatenate([past_key, k], axis=2), mx.concatenate([past_value, v], axis=2)
    check_equal_lengths(k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    queries, columns = q.shape[2], k.shape[2]
    offset = past if nonpad_kv_seqlen is None else nonpad_kv_seqlen.reshape(-1, 1, 1, 1) - queries
    visible = _position_mask(queries, columns, offset, left_window_size, 0 if is_causal else right_window_size)
    # MLX's own causal mask, which needs no array, takes the last query to be at the last column.
    is_plain_causal = bool(is_causal) and mask is None and nonpad_kv_seqlen is None and left_window_size < 0
    is_plain_causal = is_plain_causal and past + queries == columns
    if nonpad_kv_seqlen is not None:
        filled = mx.arange(columns) < nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        visible = filled if visible is None else visible & filled
    mask, may_hide_all = _merge_masks(mask, visible, columns, q.dtype)
    # Positions alone hide all columns of a query only where the query comes before the first of them.
    may_hide_all = (
        may_hide_all
        or nonpad_kv_seqlen is not None
        or (left_window_size >= 0 and past + queries - 1 - left_window_size >= columns)
    )

    scores = None
    if outputs <= 3 and not softcap:
        y = fused_attention(q, k, v, scale=scale, mask="causal" if is_plain_causal else mask)
        if may_hide_all and mask is not None:
            y = mx.where(_fully_masked_queries(mask), mx.zeros((), y.dtype), y)
    else:
        weights, scores = _weights_and_scores(
            q,
            k,
            mask,
            may_hide_all=may_hide_all,
            scale=scale,
            softcap=softcap,
            softmax_precision=softmax_precision,
            score_stage=qk_matmul_output_mode,
        )
        y = weighted_values(weights, v)
    return (merge_heads(y) if rank == 3 else y, k, v, scores)[:outputs]


def _position_mask(queries: int, columns: int, offset, left: int, right: int) -> mx.array | None:
    """Returns which columns each query sees by its position, bool [(batch, 1,) queries, columns]; None for all.

    offset: the column of the first query; left, right: how many columns before and after its own, negative for all.
    """
    if left < 0 and right < 0:
        return None
    xp = np if isinstance(offset, int) else mx
    distance = xp.arange(columns)[None, :] - (xp.arange(queries)[:, None] + offset)
    visible = distance >= -left if left >= 0 else None
    if right >= 0:
        visible = distance <= right if visible is None else visible & (distance <= right)
    return to_device(visible) if isinstance(visible, np.ndarray) else visible


def _merge_masks(mask: mx.array | None, position_mask: mx.array | None, columns: int, dtype: mx.Dtype):
    """Returns the mask with what positions hide, bool or float or None, and whether a query may see no column."""
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
    """Returns which queries see no column, bool [..., queries, 1]."""
    if mask.dtype == mx.bool_:
        return mx.logical_not(mx.any(mask, axis=-1, keepdims=True))
    return mx.max(mask, axis=-1, keepdims=True) == -mx.inf


def _weights_and_scores(
    q: mx.array,
    k: mx.array,
    mask: mx.array | None,
    *,
    may_hide_all: bool,
    scale: float,
    softcap: float,
    softmax_precision: int | None,
    score_stage: int,
) -> tuple[mx.array, mx.array]:
    """Returns the weights of the columns, and the scores after a stage: 0 product, 1 softcap, 2 mask, 3 softmax."""
    product = attention_scores(q * math.sqrt(scale), k * math.sqrt(scale))
    capped = masked = cap_scores(product, softcap)
    if mask is not None:
        masked = mx.where(mask, capped, -mx.inf) if mask.dtype == mx.bool_ else capped + mask
    if softmax_precision is None:
        weights = mx.softmax(masked, axis=-1, precise=True)
    else:
        weights = mx.softmax(saturating_cast(masked, device_dtype(softmax_precision)), axis=-1, precise=True)
    weights = weights.astype(q.dtype)
    if may_hide_all and mask is not None:
        weights = mx.where(_fully_masked_queries(mask), mx.zeros((), weights.dtype), weights)
    return weights, (product, capped, masked, weights)[score_stage]


@op("RotaryEmbedding-23")
def rotary_embedding(
    x, cos_cache, sin_cache, position_ids: Indices = None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0
):
    """The first rotary_embedding_dim (0: all) of each head's elements rotated by their position's angles.

    x [batch, heads, tokens, dim] or [batch, tokens, heads * dim]; the caches [positions, half] with position_ids
    [batch, tokens], or [batch, tokens, half]. Pairs are elements i and i + half, or 2i and 2i + 1 if interleaved. ONNX
    RotaryEmbedding-23.
    """
    rank = x.ndim
    x = x.transpose(0, 2, 1, 3) if rank == 4 else x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads)
    dim = rotary_embedding_dim or x.shape[-1]
    cos, sin = (
        (cache if position_ids is None else take_rows(cache, position_ids))[:, :, None, : dim // 2]
        for cache in (cos_cache, sin_cache)
    )
    y = rotate_pairs(x, cos, sin, bool(interleaved))
    return y.transpose(0, 2, 1, 3) if rank == 4 else y.reshape(*y.shape[:2], -1)
