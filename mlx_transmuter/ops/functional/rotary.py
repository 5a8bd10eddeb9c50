"""Rotary position embeddings: pairs of channels rotated by angles that grow with the position. Su et al. 2021."""

from collections.abc import Iterable

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import AnyIndices, take_rows
from mlx_transmuter.ops.registry import OperatorError


def rotate_pairs(
    x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False, *, rotated_heads: int | None = None
) -> mx.array:
    """Returns x [..., dim] with its first 2 · half channels rotated by the angles of cos and sin [..., half].

    Channel i pairs with i + half, or 2i with 2i + 1 where interleaved; channels past 2 · half stay as they are.
    rotated_heads: of x [rows, heads, seq, dim] only so many heads are rotated; None for all.
    """
    half = cos.shape[-1]
    if x.shape[-1] > 2 * half:
        rotated = rotate_pairs(x[..., : 2 * half], cos, sin, interleaved, rotated_heads=rotated_heads)
        return mx.concatenate([rotated, x[..., 2 * half :]], axis=-1)
    # Views of x's pairs, and choices by constants, so that the rotation compiles into one kernel and copies nothing.
    pair_axis = -1 if interleaved else -2
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = mx.split(pairs, 2, axis=pair_axis)
    cos, sin = mx.expand_dims(cos, pair_axis), mx.expand_dims(sin, pair_axis)
    is_second = mx.array([False, True] if interleaved else [[False], [True]])
    rotated = mx.where(is_second, first * sin + second * cos, first * cos - second * sin)
    if rotated_heads is not None and rotated_heads < x.shape[1]:
        is_rotated = mx.array([head < rotated_heads for head in range(x.shape[1])]).reshape(-1, 1, 1, 1)
        rotated = mx.where(is_rotated, rotated, pairs)
    return rotated.reshape(x.shape)


def rotate_by_full_tables(
    x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False, *, rotated_heads: int | None = None
) -> mx.array:
    """Returns x [..., dim] rotated by tables as wide as x, [..., dim], in which both channels of a pair have one angle.

    Channels pair, and heads are rotated, as in `rotate_pairs`.
    """
    channels = slice(0, None, 2) if interleaved else slice(0, x.shape[-1] // 2)
    return rotate_pairs(x, cos[..., channels], sin[..., channels], interleaved, rotated_heads=rotated_heads)


def gather_rotary_tables(
    cos: mx.array | None, sin: mx.array | None, positions: AnyIndices, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Returns the rows of the tables [rows, half] at positions [batch, seq] as [batch, 1, seq, half] of type dtype.

    A position past the tables (a padding token's can be) gets the last row. Raises OperatorError where a table is
    missing.
    """
    if cos is None or sin is None:
        raise OperatorError("do_rotary without its tables", "cos_cache and sin_cache")
    return take_rows(cos, positions)[:, None].astype(dtype), take_rows(sin, positions)[:, None].astype(dtype)


def rotate_at_positions(
    heads: Iterable[mx.array],
    cos: mx.array | None,
    sin: mx.array | None,
    positions: AnyIndices,
    *,
    interleaved: int = 0,
    offset: int = 0,
) -> list[mx.array]:
    """Returns each of `heads` [batch, heads, seq, dim] rotated by the tables' rows at positions [batch, seq].

    cos, sin: [rows, half]; channels before `offset` stay as they are. Raises OperatorError where a table is missing.
    """
    heads = list(heads)
    cos, sin = gather_rotary_tables(cos, sin, positions, heads[0].dtype)
    if not offset:
        return [rotate_pairs(x, cos, sin, bool(interleaved)) for x in heads]
    return [
        mx.concatenate([x[..., :offset], rotate_pairs(x[..., offset:], cos, sin, bool(interleaved))], axis=-1)
        for x in heads
    ]
