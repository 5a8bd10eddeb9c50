"""Slots of a call: the slot where each token is written, and the slot that each column is read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_transmuter.cache.layout import clip_columns, contiguous_slots, is_column, ring_column, shared_arange
from mlx_transmuter.cache.visibility import entry_end_tokens, newest_positions

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def batch_table(index: CacheIndex) -> mx.array:
    """The table of the pools that the index reads, of positions or of entries, by batch row: int32 [batch, columns]."""
    table = index.table if index.positions_per_entry == 1 else dict(index.entry_tables)[index.positions_per_entry]
    assert table is not None
    return table if index.table_row is None else mx.take(table, mx.clip(index.table_row, 0, table.shape[0] - 1), axis=0)


def slot_mapping(index: CacheIndex) -> mx.array:
    """The slot where each token is written, int32 [batch · seq], -1 for none."""
    if index.write_slots is not None:
        return mx.where(index.effective_positions >= 0, index.write_slots, -1).reshape(-1)
    columns, width = _token_columns(index), index.batch_table.shape[1]
    if index.is_ring:
        columns = mx.where(columns >= 0, ring_column(columns, width), -1)
    if index.contiguous_stride is not None and index.positions_per_entry == 1 and index.table_row is None:
        slots = contiguous_slots(shared_arange(index.batch)[:, None], columns, index.contiguous_stride)
    else:
        slots = mx.take_along_axis(index.batch_table, clip_columns(columns, width), axis=1)
    return mx.where(is_column(columns, width), slots, -1).reshape(-1)


def column_slots(index: CacheIndex) -> mx.array:
    """The slot of each column that is read, int32 [batch, columns] or [batch, seq, k]; without a table the number of
    the token among the call's."""
    if index.table is not None:
        return _at_selected_columns(index, index.batch_table)
    if index.positions_per_entry == 1:
        tokens = mx.broadcast_to(shared_arange(index.seq), (index.batch, index.seq))
    else:
        tokens = entry_end_tokens(index)[0]
    tokens = _at_selected_columns(index, tokens)
    return tokens + index.seq * shared_arange(index.batch).reshape(-1, *(1,) * (tokens.ndim - 1))


def safe_column_slots(index: CacheIndex) -> mx.array:
    """column_slots [batch, columns] in which a column that no token attends to has a slot of the same sequence: the
    first one's, or in a ring, which may have none there, the newest's."""
    slots = column_slots(index)
    if index.is_ring:
        newest_columns = ring_column(mx.maximum(newest_positions(index), 0), slots.shape[1])
        own_slot = mx.take_along_axis(slots, newest_columns, axis=1)
    else:
        own_slot = slots[:, :1]
    return mx.maximum(mx.where(index.read_mask, slots, own_slot), 0)


def _token_columns(index: CacheIndex) -> mx.array:
    """The column of each token, int32 [batch, seq], -1 for none: of an entry only the last token has one."""
    positions, size = index.effective_positions, index.positions_per_entry
    if size == 1:
        return positions
    return mx.where((positions >= 0) & (positions % size == size - 1), positions // size, -1)


def _at_selected_columns(index: CacheIndex, table: mx.array) -> mx.array:
    """table [batch, columns], or its values at the selected columns, [batch, seq, k]."""
    if index.selected_columns is None:
        return table
    columns = clip_columns(index.selected_columns, table.shape[1]).reshape(index.batch, -1)
    return mx.take_along_axis(table, columns, axis=1).reshape(index.selected_columns.shape)
