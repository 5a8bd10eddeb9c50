"""Indices over pools that keep heads apart, and over pools that hold the values after the keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.arguments import check_integer
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import INT32_MAX, in_range, pool_rows

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def index_for_heads(index: CacheIndex, num_heads: int, head_span: int) -> CacheIndex:
    """See CacheIndex.for_heads."""
    num_heads = check_integer("CacheIndex.for_heads: num_heads", num_heads, 1)
    head_span = check_integer("CacheIndex.for_heads: head_span", head_span, 1, INT32_MAX // num_heads)
    if num_heads == 1:
        return index

    def repeat(array: mx.array) -> mx.array:
        rows, *inner = array.shape
        return mx.broadcast_to(array[:, None], (rows, num_heads, *inner)).reshape(-1, *inner)  # a view of one row

    def heads_of(array: mx.array) -> mx.array:
        return mx.array(np.arange(array.shape[0], dtype=np.int32) % num_heads)

    def head_slots(slots: mx.array) -> mx.array:
        """slots int32 [n, k] as rows of the pool, [n · num_heads, k]: by row, then by head."""
        slots = repeat(slots)
        inside = in_range(slots, INT32_MAX // (num_heads * head_span) * head_span)  # beyond, rows pass int32
        return mx.where(inside, pool_rows(slots, heads_of(slots)[:, None], num_heads, head_span), -1)

    expanded = index.map_arrays(repeat, head_slots)
    table_row = expanded.table_row
    if table_row is not None and index.table is not None:
        inside = in_range(table_row, index.table.shape[0])
        table_row = mx.where(inside, table_row * num_heads + heads_of(table_row), -1)
    is_contiguous = index.contiguous_stride == head_span and not index.entry_tables
    return replace(
        expanded,
        table_row=table_row,
        contiguous_stride=head_span if is_contiguous else None,
        stride_in_signature=index.stride_in_signature and is_contiguous,
    )


def index_for_key_value_pool(index: CacheIndex, value_offset: int) -> CacheIndex:
    """See CacheIndex.for_key_value_pool."""
    value_offset = check_integer("CacheIndex.for_key_value_pool: value_offset", value_offset, 0, INT32_MAX // 2)
    if index.entry_tables:
        raise CacheError("CacheIndex.for_key_value_pool", repr(index), "an index without tables of entries")

    def twice(array: mx.array) -> mx.array:
        return mx.broadcast_to(array[None], (2, *array.shape)).reshape(-1, *array.shape[1:])  # a view of one row

    def key_and_value_slots(slots: mx.array) -> mx.array:
        return _with_offset_copy(slots, value_offset)

    expanded = index.map_arrays(twice, key_and_value_slots)
    table_row, is_contiguous = expanded.table_row, False
    if index.table is not None:
        table_rows = index.table.shape[0]
        table_row = None if index.table_row is None else _with_offset_copy(index.table_row, table_rows)
        is_contiguous = index.contiguous_stride is not None and value_offset == table_rows * index.contiguous_stride
    return replace(
        expanded,
        table_row=table_row,
        contiguous_stride=index.contiguous_stride if is_contiguous else None,
        stride_in_signature=index.stride_in_signature and is_contiguous,
    )


def _with_offset_copy(numbers: mx.array, size: int) -> mx.array:
    """numbers, indices of an axis of that size, followed by the same indices of a second axis after it.

    A number outside the first axis becomes -1, so that none reaches into the second.
    """
    offsets = mx.array([0, size], mx.int32).reshape(2, *[1] * numbers.ndim)
    return mx.where(in_range(numbers, size), numbers + offsets, -1).reshape(-1, *numbers.shape[1:])
