"""Rotary position embeddings over tables of cosines and sines: com.microsoft RotaryEmbedding, and `rotate` for the others."""

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError, op


def rotate(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False) -> mx.array:
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


def angles(table: mx.array, positions: mx.array) -> mx.array:
    """The rows of table [rows, half] at positions, int [batch, seq], to turn heads with: [batch, 1, seq, half].

    A position past the table (a padding token's can be) gets the last row: a read out of range is undefined.
    """
    rows = mx.clip(positions, 0, table.shape[0] - 1)
    return mx.take(table, rows, axis=0)[:, None]


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
    heads = x
    if x.ndim == 3:
        batch, seq, hidden = x.shape
        # The tables are as wide as half a head, unless only a part of each head turns: then the heads must be told.
        dim = hidden // num_heads if num_heads else 2 * cos_cache.shape[-1]
        if not dim or hidden % dim:
            raise OperatorError(f"a hidden size of {hidden} for heads of {dim}", "a multiple of it", "set num_heads")
        heads = x.reshape(batch, seq, hidden // dim, dim).transpose(0, 2, 1, 3)
    batch, _, seq, _ = heads.shape
    if position_ids.size == 1 and (batch, seq) != (1, 1):
        position_ids = position_ids.reshape(1, 1) + mx.arange(seq, dtype=mx.int32)[None]
    positions = position_ids.reshape(-1, seq)
    turned = rotate(heads, angles(cos_cache, positions), angles(sin_cache, positions), bool(interleaved))
    return turned.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else turned
