"""Lanes: the index over pools that keep heads apart, and over pools that hold keys and values one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_transmuter.cache import visibility as see
from mlx_transmuter.cache.errors import INT32_MAX, CacheError, check_integer

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def index_for_heads(index: CacheIndex, num_heads: int, head_span: int) -> CacheIndex:
    """See CacheIndex.heads."""
    num_heads = check_integer("CacheIndex.heads: n", num_heads, 1)
    head_span = check_integer("CacheIndex.heads: block", head_span, 1, INT32_MAX // num_heads)
    if num_heads == 1:
        return index

    def lanes(values: mx.array | None) -> mx.array | None:
        return None if values is None else mx.repeat(values, num_heads, axis=0)

    def spread(slots: mx.array) -> mx.array:
        return see.pool_rows(slots, num_heads, head_span)

    row = lanes(index.table_row)
    if row is not None and index.table is not None:
        head = mx.arange(row.shape[0], dtype=mx.int32) % num_heads
        row = mx.where((row >= 0) & (row < index.table.shape[0]), row * num_heads + head, -1)
    runs = index.run_stride == head_span and not index.every_tables
    return replace(
        index,
        token_positions=mx.repeat(index.token_positions, num_heads, axis=0),
        table=None if index.table is None else spread(index.table),
        table_row=row,
        every_tables=tuple((m, spread(table)) for m, table in index.every_tables),
        selected_columns=lanes(index.selected_columns),
        store_slots=None if index.store_slots is None else spread(index.store_slots),
        draft_mask=lanes(index.draft_mask),
        run_stride=head_span if runs else None,
        run_in_signature=index.run_in_signature and runs,
    )


def index_for_key_value_pool(index: CacheIndex, value_offset: int) -> CacheIndex:
    """See CacheIndex.twice."""
    value_offset = check_integer("CacheIndex.twice: apart", value_offset, 0, INT32_MAX // 2)
    if index.every_tables:
        raise CacheError("CacheIndex.twice", repr(index), "an index without tables of blocks")

    def lanes(values: mx.array | None) -> mx.array | None:
        return None if values is None else mx.concatenate([values, values])

    def both(slots: mx.array | None) -> mx.array | None:
        if slots is None:
            return None
        held = (slots >= 0) & (slots < value_offset)  # what is outside of the first pool must not reach into the second
        return mx.concatenate([mx.where(held, slots, -1), mx.where(held, slots + value_offset, -1)])

    row = index.table_row
    if row is not None and index.table is not None:
        rows = index.table.shape[0]
        held = (row >= 0) & (row < rows)
        row = mx.concatenate([mx.where(held, row, -1), mx.where(held, row + rows, -1)])
    runs = (
        index.run_stride is not None
        and index.table is not None
        and value_offset == index.table.shape[0] * index.run_stride
    )
    return replace(
        index,
        token_positions=mx.concatenate([index.token_positions, index.token_positions]),
        table=both(index.table),
        table_row=row,
        selected_columns=lanes(index.selected_columns),
        store_slots=both(index.store_slots),
        draft_mask=lanes(index.draft_mask),
        run_stride=index.run_stride if runs else None,
        run_in_signature=index.run_in_signature and runs,
    )
