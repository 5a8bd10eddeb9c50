"""Rotary position embeddings of com.microsoft, over tables of cosines and sines, and `rotate`, which others share."""

import mlx.core as mx

from mlx_transmuter.ops.functional.attention import shared_arange
from mlx_transmuter.ops.onnx.attention import split_heads
from mlx_transmuter.ops.registry import OperatorError, op


def rotate_pairs(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False) -> mx.array:
    """x [..., seq, dim] with its first 2 · half channels rotated by the angles of cos and sin [..., seq, half].

    Channel i pairs with i + half, or 2i with 2i + 1 where interleaved; channels past 2 · half stay. Su et al. 2021.
    """
    half = cos.shape[-1]
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    rotated, rest = (x, None) if x.shape[-1] == 2 * half else (x[..., : 2 * half], x[..., 2 * half :])
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        turned = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned if rest is None else mx.concatenate([turned, rest], axis=-1)


def gather_rotary_tables(cos: mx.array | None, sin: mx.array | None, positions: mx.array) -> tuple[mx.array, mx.array]:
    """The rows of the tables [rows, half] at positions [batch, seq], to turn heads with: [batch, 1, seq, half] each.

    A position past the tables (a padding token's can be) gets the last row: a read out of range is undefined. Raises
    OperatorError where a table is missing.
    """
    if cos is None or sin is None:
        raise OperatorError("do_rotary without its tables", "cos_cache and sin_cache")
    rows = mx.clip(positions, 0, cos.shape[0] - 1)
    return mx.take(cos, rows, axis=0)[:, None], mx.take(sin, rows, axis=0)[:, None]


def _infer_heads(x: mx.array, heads: int, table: mx.array) -> mx.array:
    """x as [batch, heads, seq, dim]; without their number the heads are as wide as the table turns."""
    if x.ndim == 4:
        return x
    dim = x.shape[-1] // heads if heads else 2 * table.shape[-1]
    if not dim or x.shape[-1] % dim:
        raise OperatorError(f"a hidden size of {x.shape[-1]} for heads of {dim}", "a multiple of it", "set num_heads")
    return split_heads(x, x.shape[-1] // dim)


@op("com.microsoft.RotaryEmbedding-1")
def rotary_embedding(
    x,
    position_ids,
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
    if position_ids.size == 1 and (batch, seq) != (1, 1):
        position_ids = position_ids.reshape(1, 1) + shared_arange(seq)[None]
    positions = position_ids.reshape(-1, seq)
    turned = rotate_pairs(heads, *gather_rotary_tables(cos_cache, sin_cache, positions), bool(interleaved))
    return turned.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else turned


@op("com.microsoft.MRotaryEmbedding-1")
def m_rotary_embedding(
    x,
    position_ids,
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
    """RotaryEmbedding by three positions a token: temporal, height and width, position_ids [3, batch, seq].

    Each angle is that of one of the three: in sections of mrope_section angles one after another (layout 0, Qwen2-VL),
    or by turns (layout 1, Qwen3-VL): of the first 3 · mrope_section[1] angles every third from 1 on is height's,
    likewise from 2 on width's. The other arguments as in RotaryEmbedding. Wang et al. 2024; com.microsoft
    MRotaryEmbedding-1.
    """
    half = sum(mrope_section)
    if mrope_layout:
        axis_of = [0] * half
        for axis in (1, 2):
            axis_of[axis : 3 * mrope_section[axis] : 3] = [axis] * len(axis_of[axis : 3 * mrope_section[axis] : 3])
    else:
        axis_of = [axis for axis, count in enumerate(mrope_section) for _ in range(count)]

    def table(cache: mx.array) -> mx.array:
        """The rows of cache for each token, each column by its own axis's position: [batch, 1, seq, half]."""
        rows = mx.take(cache, mx.clip(position_ids, 0, cache.shape[0] - 1), axis=0)
        picked = mx.array(axis_of, mx.int32)
        return mx.where(picked == 0, rows[0], mx.where(picked == 1, rows[1], rows[2]))[:, None]

    heads = _infer_heads(x, num_heads, cos_cache)
    turned = rotate_pairs(heads, table(cos_cache), table(sin_cache), bool(interleaved))
    return turned.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else turned


@op("com.microsoft.GemmaRotaryEmbedding-1")
def gemma_rotary_embedding(emb, q, q_rot, k, k_rot):
    """q · cos + q_rot · sin and k · cos + k_rot · sin by the angles emb, float32 [batch, seq, dim]; q and the others:
    [batch, heads, seq, dim], the rot ones with their halves turned already. com.microsoft GemmaRotaryEmbedding-1.
    """
    cos, sin = mx.cos(emb).astype(q.dtype)[:, None], mx.sin(emb).astype(q.dtype)[:, None]
    return q * cos + q_rot * sin, k * cos + k_rot * sin
