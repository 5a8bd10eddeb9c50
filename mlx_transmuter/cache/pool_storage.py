"""Rows of a pool, written and read by slot: nothing here knows positions, sequences or tokens."""

from __future__ import annotations

import math

import mlx.core as mx


def write_rows(pool: mx.array, slots: mx.array, values: mx.array, spare_row: int | None = None) -> mx.array:
    """pool [slots, ...] with values [n, ...] at slots int32 [n]; a slot outside the pool stores nothing, or at spare.

    Every other row keeps its bits. The write costs the n rows alone and takes the pool's memory when nobody else holds
    the pool at evaluation. Two rows aimed at one slot leave each element one of the two (elements of 8 bytes: each
    half).

    MLX drops no store and an index out of range is undefined, so a dropped row needs a target that it doesn't change.
    Writing a row's old value back won't do: that read of the old pool is unfinished when the write wants its memory,
    and MLX then copies the pool. So the rows are written as unsigned words by minimum and then by maximum: a kept row
    goes to 0 and up to its bits; a dropped one meets the neutral element both times and may aim at any slot.
    """
    if pool.size == 0 or values.size == 0:
        return pool
    if spare_row is not None:
        at = mx.where((slots >= 0) & (slots < pool.shape[0]), slots, spare_row)
        flat = (values.shape[0], math.prod(pool.shape[1:]))
        rows = pool.reshape(pool.shape[0], flat[1])
        at = mx.broadcast_to(at[:, None], flat)
        return mx.put_along_axis(rows, at, values.reshape(flat), axis=0).reshape(pool.shape)
    rows = pool.reshape(pool.shape[0], -1)
    size = rows.shape[1] * rows.dtype.size
    word = mx.uint32 if size % 4 == 0 else mx.uint16 if size % 2 == 0 else mx.uint8
    zero, top = mx.array(0, word), mx.array(2 ** (8 * word.size) - 1, word)
    kept = (slots >= 0) & (slots < pool.shape[0])
    at, kept = mx.where(kept, slots, 0), kept[:, None]
    bits = rows.view(word).at[at].minimum(mx.where(kept, zero, top))
    bits = bits.at[at].maximum(mx.where(kept, values.reshape(values.shape[0], -1).view(word), zero))
    return bits.view(pool.dtype).reshape(pool.shape)


def read_rows(pool: mx.array, slots: mx.array, mask: mx.array) -> mx.array:
    """pool [slots, ...] at slots int32 [...], zero where live (bool) is false or the slot is outside the pool."""
    if pool.size == 0:
        return mx.zeros(slots.shape + pool.shape[1:], pool.dtype)
    mask = mask & (slots >= 0) & (slots < pool.shape[0])
    return zero_unseen(mx.take(pool, mx.where(mask, slots, 0), axis=0), mask)


def view_runs(pool: mx.array, rows: int, run_stride: int, context: int) -> mx.array:
    """The first context slots of each of rows runs of stride slots, [rows, context, ...]: a view of the pool."""
    inner = pool.shape[1:]
    sizes = [math.prod(inner[axis:]) for axis in range(len(inner) + 1)]
    return mx.as_strided(pool, (rows, context, *inner), (run_stride * sizes[0], *sizes))


def zero_unseen(values: mx.array, mask: mx.array) -> mx.array:
    """values [*live, ...] where live is true, zero elsewhere whatever stands there (a product would keep NaN)."""
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
    return mx.where(mask, values, mx.array(0, values.dtype))
