"""Where tokens and columns stand, and which columns each token of a call sees: the arithmetic of a CacheIndex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.errors import INT32_MAX, CacheError

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def left_padded_positions(lengths: Sequence[Sequence[int]], seq: int) -> mx.array:
    """Positions int32 [lanes, seq]: each lane's sequences from 0, one after another, at its end, and -1 before them."""
    pos = np.full((len(lengths), seq), -1, np.int32)
    for lane, lens in zip(pos, lengths, strict=True):
        count = sum(lens)
        if count:
            lane[seq - count :] = np.concatenate([np.arange(n) for n in lens])
    return mx.array(pos)


def contiguous_table(rows: int, run_slots: int) -> mx.array:
    """The table int32 [rows, stride] of one run of slots per row, one run after another."""
    return mx.array(np.arange(rows * run_slots, dtype=np.int32).reshape(rows, run_slots))


def pool_rows(slots: mx.array, num_heads: int, head_span: int) -> mx.array:
    """slots int32 [rows, k] as the slots of each head, [rows · n, k], row by row then head; see CacheIndex.heads."""
    head = (mx.arange(slots.shape[0] * num_heads, dtype=mx.int32) % num_heads)[:, None]
    slots = mx.repeat(slots, num_heads, axis=0)
    inside = (slots >= 0) & (slots < INT32_MAX // (num_heads * head_span) * head_span)
    return mx.where(inside, (slots // head_span * num_heads + head) * head_span + slots % head_span, -1)


def effective_positions(index: CacheIndex) -> mx.array:
    """The tokens' positions int32 [batch, seq], negative for all of a lane whose row is outside the table."""
    if index.table_row is None or index.table is None:
        return index.token_positions
    inside = (index.table_row >= 0) & (index.table_row < index.table.shape[0])
    return mx.where(inside[:, None], index.token_positions, -1)


def batch_table(index: CacheIndex) -> mx.array:
    """The table whose slots the pools are, of positions or of blocks, lane by lane: int32 [batch, columns]."""
    table = index.table if index.positions_per_column == 1 else dict(index.every_tables)[index.positions_per_column]
    assert table is not None
    return table if index.table_row is None else mx.take(table, mx.clip(index.table_row, 0, table.shape[0] - 1), axis=0)


def visible_columns(index: CacheIndex) -> mx.array:
    """Which columns each token sees: bool [batch, seq, context], or [batch, seq, k] of those it chose."""
    tokens, window, chosen = index.effective_positions, index.window_size, index.selected_columns
    if index.table is None and index.positions_per_column == 1:
        seen = _is_visible(tokens[:, None, :], tokens[:, :, None], window)
        if index.kind == "packed":  # sequences of one lane differ in the token that begins them
            start = mx.arange(index.seq, dtype=mx.int32) - tokens
            seen = seen & (start[:, None, :] == start[:, :, None])
        return (
            seen
            if chosen is None
            else mx.take_along_axis(seen, _clip_columns(chosen, index.seq), axis=2) & _is_in_context(chosen, index)
        )
    if chosen is not None:
        at_columns = block_end_positions(_clip_columns(chosen, index.context), index.positions_per_column)
        return _is_visible(at_columns, tokens[:, :, None], window) & _is_in_context(chosen, index)
    before = _is_visible(table_column_positions(index)[..., None, :], tokens[:, :, None], window)
    if index.draft_mask is None:
        return before
    before = before & (table_column_positions(index)[..., None, :] < _oldest_positions(tokens)[:, :, None])
    own = _is_visible(tokens[:, None, :], tokens[:, :, None], window) & index.draft_mask
    return mx.concatenate([before, own], axis=2)


def read_mask(index: CacheIndex) -> mx.array:
    """Which of the columns that are read some token sees: bool, as sources."""
    if index.selected_columns is not None:
        return index._mask
    if index.table is None:
        return _block_end_tokens(index)[1]
    return index._mask[..., : index.batch_table.shape[1]].any(axis=1)


def slot_mapping(index: CacheIndex) -> mx.array:
    """The slot each token stores at, int32 [batch · seq], -1 for none."""
    tokens, every = index.effective_positions, index.positions_per_column
    if index.store_slots is not None:
        return mx.where(tokens >= 0, index.store_slots, -1).reshape(-1)
    own = tokens if every == 1 else mx.where((tokens >= 0) & (tokens % every == every - 1), tokens // every, -1)
    width = index.batch_table.shape[1]
    if index.is_ring:
        own = mx.where(own >= 0, own % width, -1)
    if index.run_stride is not None and every == 1 and index.table_row is None:  # one run of slots after another
        slots = own + index.run_stride * mx.arange(index.batch, dtype=mx.int32)[:, None]
    else:
        slots = mx.take_along_axis(index.batch_table, _clip_columns(own, width), axis=1)
    return mx.where((own >= 0) & (own <= last_index(width)), slots, -1).reshape(-1)


def column_slots(index: CacheIndex) -> mx.array:
    """The slot of each column read, int32 [batch, columns] or [batch, seq, k]; of a whole index, the token."""
    if index.table is not None:
        return _at_selected_columns(index, index.batch_table)
    tokens = mx.broadcast_to(mx.arange(index.seq, dtype=mx.int32), (index.batch, index.seq))
    tokens = _at_selected_columns(index, tokens if index.positions_per_column == 1 else _block_end_tokens(index)[0])
    return tokens + index.seq * mx.arange(index.batch, dtype=mx.int32).reshape(-1, *(1,) * (tokens.ndim - 1))


def safe_column_slots(index: CacheIndex) -> mx.array:
    """sources [batch, columns], with the lane's first slot, of a ring its newest, in place of those no token sees."""
    slots = column_slots(index)
    # A ring may have no slot at its first column.
    one = (
        mx.take_along_axis(slots, mx.maximum(_newest_positions(index), 0) % slots.shape[1], axis=1)
        if index.is_ring
        else slots[:, :1]
    )
    return mx.maximum(mx.where(read_mask(index), slots, one), 0)


def table_column_positions(index: CacheIndex) -> mx.array:
    """The position at which each column stands, a draft's own aside: int32 [columns], of a ring [batch, columns]."""
    width = index.context if index.draft_mask is None else index.batch_table.shape[1]
    columns = mx.arange(width, dtype=mx.int32)
    if not index.is_ring:
        return block_end_positions(columns, index.positions_per_column)
    tokens, window = 1 if index.draft_mask is not None else index.seq, index.window_size
    if window is None or window + tokens - 1 > width:
        found = f"a ring of {width} columns, {'no window' if window is None else f'a window of {window}'}"
        raise CacheError(
            "CacheIndex.mask", f"{found} and {tokens} tokens", "a ring of the window and the tokens beside it"
        )
    newest = _newest_positions(index)
    return newest - (newest - columns) % width


def _newest_positions(index: CacheIndex) -> mx.array:
    """The greatest position of the lane that the table holds, int32 [batch, 1]: of its tokens, or before a draft."""
    return (
        index.effective_positions.max(axis=1, keepdims=True)
        if index.draft_mask is None
        else _oldest_positions(index.effective_positions) - 1
    )


def _oldest_positions(tokens: mx.array) -> mx.array:
    """The least position of each lane's tokens, int32 [batch, 1], INT32_MAX where there is none."""
    return mx.where(tokens >= 0, tokens, INT32_MAX).min(axis=1, keepdims=True)


def _is_visible(places: mx.array, tokens: mx.array, window: int | None) -> mx.array:
    """Whether tokens at positions see columns standing at places, broadcast; padding neither sees nor is seen."""
    seen = (places >= 0) & (places <= tokens)
    return seen if window is None else seen & (places > tokens - min(window, INT32_MAX))


def block_end_positions(columns: mx.array, positions_per_column: int) -> mx.array:
    """The position each column stands at: its own, or the last one of its block."""
    return columns if positions_per_column == 1 else columns * positions_per_column + (positions_per_column - 1)


def last_index(width: int) -> mx.array:
    """width - 1, int32 [1], as an array that is made: a constant would be part of the kernels that it is compiled into,
    and each width of a table would build its own."""
    return mx.arange(width - 1, width, dtype=mx.int32)


def _clip_columns(columns: mx.array, width: int) -> mx.array:
    return mx.clip(columns, 0, last_index(width))


def _is_in_context(columns: mx.array, index: CacheIndex) -> mx.array:
    return (columns >= 0) & (columns <= last_index(index.context))


def _at_selected_columns(index: CacheIndex, table: mx.array) -> mx.array:
    """table [batch, columns], or under a selection what it has at the columns each token chose, [batch, seq, k]."""
    if index.selected_columns is None:
        return table
    flat = _clip_columns(index.selected_columns, table.shape[1]).reshape(index.batch, -1)
    return mx.take_along_axis(table, flat, axis=1).reshape(index.selected_columns.shape)


def _block_end_tokens(index: CacheIndex) -> tuple[mx.array, mx.array]:
    """Of a whole index: the token that closes each block, int32 [batch, blocks], and whether the lane has it.

    Lanes are padded on the left, so the token at position p is p tokens after the lane's first.
    """
    blocks = block_end_positions(mx.arange(index.context, dtype=mx.int32), index.positions_per_column)
    token = blocks + (index.seq - 1 - index.effective_positions[:, -1:])
    return _clip_columns(token, index.seq), token < index.seq
