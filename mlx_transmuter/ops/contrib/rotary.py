"""Rotary position embeddings of com.microsoft, by tables of cosines and sines."""

import math

import mlx.core as mx

from mlx_transmuter.ops.functional.attention import following_positions
from mlx_transmuter.ops.functional.heads import split_heads
from mlx_transmuter.ops.functional.indexing import element, take_rows
from mlx_transmuter.ops.functional.rotary import rotate_at_positions, rotate_pairs
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op


def _infer_heads(x: mx.array, heads: int, table: mx.array) -> mx.array:
    """Returns x as [batch, heads, seq, dim]; where their number is 0, the heads are as wide as the table rotates."""
    if x.ndim == 4:
        return x
    dim = x.shape[-1] // heads if heads else 2 * table.shape[-1]
    if not dim or x.shape[-1] % dim:
        raise OperatorError(f"a hidden size of {x.shape[-1]} for heads of {dim}", "a multiple of it", "set num_heads")
    return split_heads(x, x.shape[-1] // dim)


@op("com.microsoft.RotaryEmbedding-1")
def rotary_embedding(
    x,
    position_ids: Indices,
    cos_cache,
    sin_cache,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
):
    """x [batch, seq, heads · dim] or [batch, heads, seq, dim] rotated by the tables' rows at position_ids.

    position_ids: [batch, seq], or [1], the position of the first token. cos_cache, sin_cache: [rows, rotated / 2].
    scale and is_packed_batching change nothing, as in onnxruntime. com.microsoft RotaryEmbedding-1.
    """
    heads = _infer_heads(x, num_heads, cos_cache)
    batch, _, seq, _ = heads.shape
    positions = Indices.of(position_ids)
    if math.prod(positions.shape) == 1 and (batch, seq) != (1, 1):
        positions = following_positions(positions.reshape(1), seq)
    positions = positions.reshape(-1, seq)
    (y,) = rotate_at_positions([heads], cos_cache, sin_cache, positions, interleaved=interleaved)
    return y.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else y


@op("com.microsoft.MRotaryEmbedding-1")
def m_rotary_embedding(
    x,
    position_ids: Indices,
    cos_cache,
    sin_cache,
    *,
    mrope_section: list[int],
    interleaved: int = 0,
    is_packed_batching: int = 0,
    mrope_layout: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
):
    """RotaryEmbedding by three positions per token: temporal, height and width, position_ids [3, batch, seq].

    Each angle follows one of the three positions: in sections of mrope_section angles one after another (layout 0,
    Qwen2-VL), or alternating (layout 1, Qwen3-VL): of the first 3 · mrope_section[1] angles every third from 1 on
    follows the height, likewise from 2 on the width. The other arguments as in RotaryEmbedding. Wang et al. 2024;
    com.microsoft MRotaryEmbedding-1.
    """
    half = cos_cache.shape[-1]
    if min(mrope_section) < 0 or sum(mrope_section) != half:
        raise OperatorError(f"mrope_section {mrope_section}", f"numbers that sum to the {half} angles of cos_cache")
    if mrope_layout:
        axis_of = [0] * half
        for axis in (1, 2):
            axis_of[axis : 3 * mrope_section[axis] : 3] = [axis] * len(axis_of[axis : 3 * mrope_section[axis] : 3])
    else:
        axis_of = [axis for axis, count in enumerate(mrope_section) for _ in range(count)]

    def table(cache: mx.array) -> mx.array:
        """Returns the rows of cache for each token, each column by the position of its axis: [batch, 1, seq, half]."""
        temporal, height, width = (element(take_rows(cache, position_ids), axis) for axis in range(3))
        picked = mx.array(axis_of, mx.int32)
        rows = mx.where(picked == 0, temporal, mx.where(picked == 1, height, width))
        return rows[:, None].astype(x.dtype)

    heads = _infer_heads(x, num_heads, cos_cache)
    y = rotate_pairs(heads, table(cos_cache), table(sin_cache), bool(interleaved))
    return y.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else y


@op("com.microsoft.GemmaRotaryEmbedding-1")
def gemma_rotary_embedding(emb, q, q_rot, k, k_rot):
    """q · cos + q_rot · sin and k · cos + k_rot · sin by the angles emb, float32 [batch, seq, dim].

    q, q_rot, k, k_rot: [batch, heads, seq, dim]; q_rot and k_rot have their halves swapped and one negated already.
    com.microsoft GemmaRotaryEmbedding-1.
    """
    cos, sin = mx.cos(emb).astype(q.dtype)[:, None], mx.sin(emb).astype(q.dtype)[:, None]
    return q * cos + q_rot * sin, k * cos + k_rot * sin
