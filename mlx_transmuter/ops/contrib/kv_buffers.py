"""Buffers of keys and values with free columns: written at a column known only when the step runs, and attended."""

from typing import cast

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.ops.functional.attention import (
    add_biases,
    attention_weights_and_scores,
    padding_mask_bias,
    weighted_values,
)
from mlx_transmuter.ops.functional.heads import merge_heads
from mlx_transmuter.ops.functional.indexing import (
    AnyIndices,
    clip_indices,
    index_array,
    put_along_axis,
    take_along_axis,
    update_slice,
)
from mlx_transmuter.ops.indices import Indices, IntegerRange
from mlx_transmuter.ops.registry import OperatorError


def value_if_known(number: mx.array | None, default: int) -> int:
    """Returns the value of an array of one element where it is known while a step is traced, else `default`."""
    if number is None:
        return default
    try:
        return int(cast(int, number.item()))
    except ValueError:  # MLX's error for the value of an array that is traced
        return default


def first_columns(start: Indices, seq: int, capacity: int) -> Indices:
    """Returns the columns [batch] of each row's first token, such that its seq tokens fit a buffer of that capacity.

    Raises OperatorError for more tokens than columns.
    """
    if seq > capacity:
        raise OperatorError(f"{seq} tokens for a buffer of {capacity} columns", "as many columns, or more")
    return Indices.between(clip_indices(start, 0, capacity - seq), 0, capacity - seq)


def write_to_buffer(
    buffer: mx.array | None, rows: mx.array, start: AnyIndices, capacity: int, counts: mx.array | None = None
) -> mx.array:
    """Returns the buffer [batch, heads, length, dim] with rows [batch, heads, seq, dim] written into it.

    The buffer is first extended to `capacity`; None is an empty one. start: the column of each row's first token, of
    `first_columns` where there are no counts. counts: int32 [batch], of how many tokens each row is written, all where
    None.
    """
    batch, heads, seq, dim = rows.shape
    if (buffer is None or not buffer.shape[2]) and capacity == seq and counts is None:
        return rows
    if buffer is None:
        buffer = mx.zeros((batch, heads, capacity, dim), dtype=rows.dtype)
    elif buffer.shape[2] < capacity:
        buffer = mx.pad(buffer, [(0, 0), (0, 0), (0, capacity - buffer.shape[2]), (0, 0)])
    rows = rows.astype(buffer.dtype)
    if counts is not None:
        return _merge_into_buffer(buffer, rows, index_array(start), counts)
    if batch == 1:
        return update_slice(buffer, rows, start, axis=2)
    places = index_array(start)[:, None, None, None] + shared_arange(seq)[None, None, :, None]
    known = Indices.of(start).range
    last = None if known is None else IntegerRange(known.low, known.high + seq - 1)
    return put_along_axis(buffer, Indices(mx.broadcast_to(places, rows.shape), last), rows, axis=2)


def _merge_into_buffer(buffer: mx.array, rows: mx.array, start: mx.array, counts: mx.array) -> mx.array:
    """Returns the buffer with the first counts[b] of each row's tokens from column start[b] on, as far as it goes.

    A write would also place the padding after them, for which the buffer may have no columns.
    """
    seq = rows.shape[2]
    token = shared_arange(buffer.shape[2])[None] - start[:, None]
    is_token = ((token >= 0) & (token < mx.minimum(counts, seq)[:, None]))[:, None, :, None]
    places = mx.broadcast_to(mx.clip(token, 0, seq - 1)[:, None, :, None], buffer.shape)
    return mx.where(is_token, take_along_axis(rows, Indices.between(places, 0, seq - 1), axis=2), buffer)


def attend_over_buffers(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    key_buffer: mx.array,
    value_buffer: mx.array,
    *,
    past_length: Indices,
    cache_indirection: Indices | None,
    mask: mx.array | None,
    attention_bias: mx.array | None,
    mask_filter_value: float,
    scale: float,
    unidirectional: bool,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Returns attention over buffers that hold past_length tokens: the output, the new buffers, and the scores.

    q, k, v: the step's, [batch, heads, seq, dim]; key_buffer, value_buffer: [batch, heads, capacity, dim]; past_length:
    one int32 for all rows; cache_indirection: int32 [batch / beams, beams, capacity], for each column of a row the beam
    of its group that holds it; mask and attention_bias have a column per token.
    """
    batch, _, seq, _ = q.shape
    capacity = key_buffer.shape[2]
    first = first_columns(Indices(index_array(past_length).reshape(-1)[:1], past_length.range), seq, capacity)
    length = index_array(first)
    start = Indices(mx.broadcast_to(length, (batch,)), first.range)
    k, v = write_to_buffer(key_buffer, k, start, capacity), write_to_buffer(value_buffer, v, start, capacity)
    columns = shared_arange(capacity)
    newest = length + (shared_arange(seq) if unidirectional else seq - 1)
    visible = columns <= newest[:, None]
    added = None
    for bias in (attention_bias, _buffer_padding_bias(mask, batch, seq, capacity, mask_filter_value, q.dtype)):
        if bias is not None:
            short = capacity - bias.shape[-1]
            added = add_biases(added, mx.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, short)]) if short > 0 else bias)
    context_k, context_v = k, v
    if cache_indirection is not None:
        context_k, context_v = (_gather_beams(buffer, cache_indirection, columns < length) for buffer in (k, v))
    weights, scores = attention_weights_and_scores(q, context_k, scale, bias=added, visibility=visible)
    widths = [bias.shape[-1] for bias in (attention_bias, mask) if bias is not None and bias.ndim > 1]
    total = widths[0] if widths else min(value_if_known(length, capacity - seq) + seq, capacity)
    return merge_heads(weighted_values(weights, context_v)), k, v, scores[..., :total].astype(q.dtype)


def _buffer_padding_bias(
    mask: mx.array | None, batch: int, seq: int, capacity: int, value: float, dtype: mx.Dtype
) -> mx.array | None:
    if mask is None:
        return None
    return padding_mask_bias(mask, batch, seq, capacity if mask.ndim == 1 else mask.shape[-1], value, dtype)


def _gather_beams(buffer: mx.array, cache_indirection: Indices, is_past: mx.array) -> mx.array:
    """Returns the buffer [rows, heads, capacity, dim] with each past column taken from the row of its beam."""
    rows, _, capacity, _ = buffer.shape
    beams = cache_indirection.shape[1]
    own = shared_arange(rows)[:, None]
    beam = clip_indices(cache_indirection, 0, beams - 1).reshape(rows, -1)[:, :capacity]
    source = mx.where(is_past, own // beams * beams + beam, own)[:, None, :, None]
    return take_along_axis(buffer, mx.broadcast_to(source, buffer.shape), axis=0)
