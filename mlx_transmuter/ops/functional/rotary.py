"""Rotary position embeddings: pairs of channels rotated by angles that grow with the position. Su et al. 2021."""

from collections.abc import Iterable

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError


def rotate_pairs(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False) -> mx.array:
    """Returns x [..., dim] with its first 2 · half channels rotated by the angles of cos and sin [..., half].

    Channel i pairs with i + half, or 2i with 2i + 1 where interleaved; channels past 2 · half stay as they are.
    """
    half = cos.shape[-1]
    rotated, rest = (x, None) if x.shape[-1] == 2 * half else (x[..., : 2 * half], x[..., 2 * half :])
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        y = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(rotated.shape)
    else:
        a, b = rotated[..., :half], rotated[..., half:]
        y = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return y if rest is None else mx.concatenate([y, rest], axis=-1)


def rotate_by_full_tables(x: mx.array, cos: mx.array, sin: mx.array, interleaved: bool = False) -> mx.array:
    """Returns x [..., dim] rotated by tables as wide as x, [..., dim], in which both channels of a pair have one angle.

    Channels pair as in `rotate_pairs`.
    """
    if interleaved:
        return rotate_pairs(x, cos[..., ::2], sin[..., ::2], interleaved=True)
    # Written with x's halves swapped, the rotation compiles into one kernel.
    first, second = mx.split(x, 2, axis=-1)
    sin_first, sin_second = mx.split(sin, 2, axis=-1)
    return x * cos + mx.concatenate([second, first], axis=-1) * mx.concatenate([-sin_first, sin_second], axis=-1)


def gather_rotary_tables(
    cos: mx.array | None, sin: mx.array | None, positions: mx.array, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Returns the rows of the tables [rows, half] at positions [batch, seq] as [batch, 1, seq, half] of type dtype.

    A position past the tables (a padding token's can be) gets the last row: a read out of range is undefined. Raises
    OperatorError where a table is missing.
    """
    if cos is None or sin is None:
        raise OperatorError("do_rotary without its tables", "cos_cache and sin_cache")
    rows = mx.clip(positions, 0, cos.shape[0] - 1)
    return (
        mx.take(cos, rows, axis=0)[:, None].astype(dtype),
        mx.take(sin, rows, axis=0)[:, None].astype(dtype),
    )


def rotate_at_positions(
    heads: Iterable[mx.array],
    cos: mx.array | None,
    sin: mx.array | None,
    positions: mx.array,
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
