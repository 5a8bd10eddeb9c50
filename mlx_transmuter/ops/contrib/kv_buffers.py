"""Buffers of keys and values longer than what they hold: written at a place that only the step knows, and read."""

from typing import cast

import mlx.core as mx

from mlx_transmuter.ops.functional.attention import (
    add_biases,
    attention_weights_and_scores,
    padding_mask_bias,
    shared_arange,
    weighted_values,
)
from mlx_transmuter.ops.onnx.attention import merge_heads


def value_if_known(number: mx.array | None, default: int) -> int:
    """The number, one element, where it is known while a step is traced; else `otherwise`."""
    if number is None:
        return default
    try:
        return int(cast(int, number.item()))
    except ValueError:  # MLX's error for the value of an array that is traced
        return default


def write_to_buffer(buffer: mx.array | None, rows: mx.array, start: mx.array, capacity: int) -> mx.array:
    """past [batch, heads, length, dim], made capacity long, with rows [batch, heads, seq, dim] from start on."""
    batch, heads, seq, dim = rows.shape
    if (buffer is None or not buffer.shape[2]) and capacity == seq:
        return rows
    if buffer is None:
        buffer = mx.zeros((batch, heads, capacity, dim), dtype=rows.dtype)
    elif buffer.shape[2] < capacity:
        buffer = mx.pad(buffer, [(0, 0), (0, 0), (0, capacity - buffer.shape[2]), (0, 0)])
    rows = rows.astype(buffer.dtype)
    if batch == 1:
        return mx.slice_update(buffer, rows, start, axes=(2,))
    places = start[:, None, None, None] + shared_arange(seq)[None, None, :, None]
    return mx.put_along_axis(buffer, mx.broadcast_to(places, rows.shape), rows, axis=2)


def attend_over_buffers(
    q: mx.array,
    step_keys_values: tuple[mx.array, mx.array],
    buffers: tuple[mx.array, mx.array],
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
    capacity = buffers[0].shape[2]
    length = past_length.reshape(-1)[:1]
    start = mx.broadcast_to(length, (batch,))
    k, v = (
        write_to_buffer(buffer, rows, start, capacity) for buffer, rows in zip(buffers, step_keys_values, strict=True)
    )
    columns = shared_arange(capacity)
    newest = length + (shared_arange(seq) if unidirectional else seq - 1)
    visible = columns <= newest[:, None]
    added = None
    for bias in (attention_bias, _buffer_padding_bias(mask, batch, seq, capacity, mask_filter_value, q.dtype)):
        if bias is not None:
            short = capacity - bias.shape[-1]
            added = add_biases(added, mx.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, short)]) if short > 0 else bias)
    k_seen, v_seen = k, v
    if cache_indirection is not None:
        k_seen, v_seen = (_gather_beams(buffer, cache_indirection, columns < length) for buffer in (k, v))
    weights, raw = attention_weights_and_scores(q, k_seen, scale, added, visible)
    given = [bias.shape[-1] for bias in (attention_bias, mask) if bias is not None and bias.ndim > 1]
    total = given[0] if given else min(value_if_known(length, capacity - seq) + seq, capacity)
    return merge_heads(weighted_values(weights, v_seen)), k, v, raw[..., :total].astype(q.dtype)


def _buffer_padding_bias(
    mask: mx.array | None, batch: int, seq: int, capacity: int, value: float, dtype: mx.Dtype
) -> mx.array | None:
    if mask is None:
        return None
    return padding_mask_bias(mask, batch, seq, capacity if mask.ndim == 1 else mask.shape[-1], value, dtype)


def _gather_beams(buffer: mx.array, cache_indirection: mx.array, is_past: mx.array) -> mx.array:
    """The buffer [rows, heads, capacity, dim] with each column that is old taken from the row of its beam."""
    rows, _, capacity, _ = buffer.shape
    beams = cache_indirection.shape[1]
    own = shared_arange(rows)[:, None]
    source = own // beams * beams + cache_indirection.reshape(rows, -1)[:, :capacity]
    source = mx.where(is_past, source, own)[:, None, :, None]
    # A gather over rows for each column: axis 0 is indexed, the others are their own.
    return mx.take_along_axis(buffer, mx.broadcast_to(source, buffer.shape), axis=0)
