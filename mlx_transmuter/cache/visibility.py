"""Visibility: the positions of tokens and columns, and which columns each token of a call attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import INT32_MAX, clip_columns, in_range, is_column, ring_position, shared_arange

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def effective_positions(index: CacheIndex) -> mx.array:
    """The tokens' positions int32 [batch, seq], negative in a batch row whose table row is outside the table."""
    if index.table_row is None or index.table is None:
        return index.token_positions
    has_sequence = in_range(index.table_row, index.table.shape[0])
    return mx.where(has_sequence[:, None], index.token_positions, -1)


def is_visible(column_positions: mx.array, token_positions: mx.array, window: int | None) -> mx.array:
    """Whether tokens attend to columns, by their positions, broadcast: causally, and inside the window if there is one.

    Padding (a negative position) attends to nothing, and nothing attends to it.
    """
    visible = (column_positions >= 0) & (column_positions <= token_positions)
    return visible if window is None else visible & (column_positions > token_positions - min(window, INT32_MAX))


def entry_end_positions(columns: mx.array, positions_per_entry: int) -> mx.array:
    """The position of each column: its own number, or the last position of its entry."""
    return columns if positions_per_entry == 1 else columns * positions_per_entry + (positions_per_entry - 1)


def visible_columns(index: CacheIndex) -> mx.array:
    """Which columns each token attends to: bool [batch, seq, context], or [batch, seq, k] of the selected columns."""
    if index.table is None and index.positions_per_entry == 1:
        return _visible_tokens(index)
    if index.selected_columns is not None:
        return _visible_selected_columns(index, index.selected_columns)
    if index.ancestor_mask is not None:
        return _visible_under_draft(index, index.ancestor_mask)
    return _visible_table_columns(index)


def read_mask(index: CacheIndex) -> mx.array:
    """Which of the columns that are read some token attends to: bool, of the shape of column_slots."""
    if index.selected_columns is not None:
        return index.visible_columns
    if index.table is None:
        return entry_end_tokens(index)[1]
    return index.visible_columns[..., : index.batch_table.shape[1]].any(axis=1)


def table_column_positions(index: CacheIndex) -> mx.array:
    """The position of each column of the table, without those of a draft: int32 [columns], of a ring [batch, columns].

    Raises CacheError for a ring that is smaller than the window and the call's further tokens.
    """
    width = index.context if index.ancestor_mask is None else index.batch_table.shape[1]
    columns = shared_arange(width)
    if not index.is_ring:
        return entry_end_positions(columns, index.positions_per_entry)
    _check_ring(index, width)
    return ring_position(columns, newest_positions(index), width)


def newest_positions(index: CacheIndex) -> mx.array:
    """The greatest position of each batch row that the table holds, int32 [batch, 1]: of its tokens, or the position
    before those of a draft."""
    if index.ancestor_mask is None:
        return index.effective_positions.max(axis=1, keepdims=True)
    return _oldest_positions(index.effective_positions) - 1


def entry_end_tokens(index: CacheIndex) -> tuple[mx.array, mx.array]:
    """Of an index without a table: the token at the last position of each entry, int32 [batch, entries], and whether
    the batch row has it, bool [batch, entries].

    Rows are padded on the left, so the token at position p is p tokens after the row's first.
    """
    last_positions = entry_end_positions(shared_arange(index.context), index.positions_per_entry)
    tokens = last_positions + (index.seq - 1 - index.effective_positions[:, -1:])
    return clip_columns(tokens, index.seq), tokens < index.seq


def _visible_tokens(index: CacheIndex) -> mx.array:
    """visible_columns of an index without a table, whose columns are the call's tokens."""
    tokens, selected = index.effective_positions, index.selected_columns
    visible = is_visible(tokens[:, None, :], tokens[:, :, None], index.window_size)
    if index.kind == "packed":  # the sequences of a row differ in the token that begins them
        first_token = shared_arange(index.seq) - tokens
        visible = visible & (first_token[:, None, :] == first_token[:, :, None])
    if selected is None:
        return visible
    return mx.take_along_axis(visible, clip_columns(selected, index.seq), axis=2) & is_column(selected, index.context)


def _visible_selected_columns(index: CacheIndex, selected: mx.array) -> mx.array:
    """visible_columns of a selection of the columns of a table of positions or of entries."""
    column_positions = entry_end_positions(clip_columns(selected, index.context), index.positions_per_entry)
    visible = is_visible(column_positions, index.effective_positions[:, :, None], index.window_size)
    return visible & is_column(selected, index.context)


def _visible_table_columns(index: CacheIndex) -> mx.array:
    """visible_columns of the columns of the table of positions or of entries: bool [batch, seq, columns]."""
    column_positions = table_column_positions(index)[..., None, :]
    return is_visible(column_positions, index.effective_positions[:, :, None], index.window_size)


def _visible_under_draft(index: CacheIndex, ancestor_mask: mx.array) -> mx.array:
    """visible_columns of a draft: the table's columns before the draft's first position, then the draft's tokens."""
    tokens = index.effective_positions
    before_draft = table_column_positions(index)[..., None, :] < _oldest_positions(tokens)[:, :, None]
    in_draft = is_visible(tokens[:, None, :], tokens[:, :, None], index.window_size) & ancestor_mask
    return mx.concatenate([_visible_table_columns(index) & before_draft, in_draft], axis=2)


def _check_ring(index: CacheIndex, width: int) -> None:
    tokens, window = 1 if index.ancestor_mask is not None else index.seq, index.window_size
    if window is None or window + tokens - 1 > width:
        named_window = "no window" if window is None else f"a window of {window}"
        found = f"a ring of {width} columns, {named_window} and {tokens} tokens"
        raise CacheError("CacheIndex.mask", found, "at least window + tokens - 1 columns")


def _oldest_positions(tokens: mx.array) -> mx.array:
    """The least position of each batch row's tokens, int32 [batch, 1], INT32_MAX in a row of padding."""
    return mx.where(tokens >= 0, tokens, INT32_MAX).min(axis=1, keepdims=True)
