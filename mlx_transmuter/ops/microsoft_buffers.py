"""Buffers of keys and values longer than what they hold: written at a place that only the step knows, and read."""

from typing import cast

import mlx.core as mx

from mlx_transmuter.ops.attention import join_heads
from mlx_transmuter.ops.microsoft_scores import numbers, padding_bias, scores, total_bias, weighted


def known(number: mx.array | None, otherwise: int) -> int:
    """The number, one element, where it is known while a step is traced; else `otherwise`."""
    if number is None:
        return otherwise
    try:
        return int(cast(int, number.item()))
    except ValueError:  # MLX's error for the value of an array that is traced
        return otherwise


def written(past: mx.array | None, rows: mx.array, start: mx.array, capacity: int) -> mx.array:
    """past [batch, heads, length, dim], made capacity long, with rows [batch, heads, seq, dim] from start on."""
    batch, heads, seq, dim = rows.shape
    if (past is None or not past.shape[2]) and capacity == seq:
        return rows
    if past is None:
        past = mx.zeros((batch, heads, capacity, dim), dtype=rows.dtype)
    elif past.shape[2] < capacity:
        past = mx.pad(past, [(0, 0), (0, 0), (0, capacity - past.shape[2]), (0, 0)])
    rows = rows.astype(past.dtype)
    if batch == 1:
        return mx.slice_update(past, rows, start, axes=(2,))
    places = start[:, None, None, None] + numbers(seq)[None, None, :, None]
    return mx.put_along_axis(past, mx.broadcast_to(places, rows.shape), rows, axis=2)


def attend_buffer(
    q: mx.array,
    new: tuple[mx.array, mx.array],
    past: tuple[mx.array, mx.array],
    past_length: mx.array,
    cache_indirection: mx.array | None,
    mask: mx.array | None,
    attention_bias: mx.array | None,
    mask_filter_value: float,
    scale: float,
    unidirectional: bool,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Attention over buffers that hold past_length tokens: the output, the buffers with the new tokens, and the scores.

    q: [batch, heads, seq, dim]; new: keys and values of the step, past: the buffers, [batch, heads, capacity, dim];
    past_length: one int32 for all rows; cache_indirection: int32 [batch / beams, beams, capacity], the beam of the same
    group that each column of a row comes from; mask and attention_bias reach as far as the tokens do.
    """
    batch, _, seq, _ = q.shape
    capacity = past[0].shape[2]
    length = past_length.reshape(-1)[:1]
    start = mx.broadcast_to(length, (batch,))
    k, v = (written(buffer, rows, start, capacity) for buffer, rows in zip(past, new, strict=True))
    columns = numbers(capacity)
    newest = length + (numbers(seq) if unidirectional else seq - 1)
    visible = columns <= newest[:, None]
    added = None
    for bias in (attention_bias, _filled(mask, batch, seq, capacity, mask_filter_value, q.dtype)):
        if bias is not None:
            short = capacity - bias.shape[-1]
            added = total_bias(added, mx.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, short)]) if short > 0 else bias)
    k_seen, v_seen = k, v
    if cache_indirection is not None:
        k_seen, v_seen = (_by_beam(buffer, cache_indirection, columns < length) for buffer in (k, v))
    weights, raw = scores(q, k_seen, scale, added, visible)
    given = [bias.shape[-1] for bias in (attention_bias, mask) if bias is not None and bias.ndim > 1]
    total = given[0] if given else min(known(length, capacity - seq) + seq, capacity)
    return join_heads(weighted(weights, v_seen)), k, v, raw[..., :total].astype(q.dtype)


def _filled(
    mask: mx.array | None, batch: int, seq: int, capacity: int, value: float, dtype: mx.Dtype
) -> mx.array | None:
    if mask is None:
        return None
    return padding_bias(mask, batch, seq, capacity if mask.ndim == 1 else mask.shape[-1], value, dtype)


def _by_beam(buffer: mx.array, cache_indirection: mx.array, old: mx.array) -> mx.array:
    """The buffer [rows, heads, capacity, dim] with each column that is old taken from the row of its beam."""
    rows, _, capacity, _ = buffer.shape
    beams = cache_indirection.shape[1]
    own = numbers(rows)[:, None]
    source = own // beams * beams + cache_indirection.reshape(rows, -1)[:, :capacity]
    source = mx.where(old, source, own)[:, None, :, None]
    # A gather over rows for each column: axis 0 is indexed, the others are their own.
    return mx.take_along_axis(buffer, mx.broadcast_to(source, buffer.shape), axis=0)
