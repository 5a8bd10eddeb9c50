"""Where tokens and columns stand, and which columns each token of a call sees: the arithmetic of a CacheIndex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.error import INT32_MAX, CacheError

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def left_padded(lanes: Sequence[Sequence[int]], seq: int) -> mx.array:
    """Positions int32 [lanes, seq]: each lane's sequences from 0, one after another, at its end, and -1 before them."""
    pos = np.full((len(lanes), seq), -1, np.int32)
    for lane, lens in zip(pos, lanes, strict=True):
        count = sum(lens)
        if count:
            lane[seq - count :] = np.concatenate([np.arange(n) for n in lens])
    return mx.array(pos)


def runs(rows: int, stride: int) -> mx.array:
    """The table int32 [rows, stride] of one run of slots per row, one run after another."""
    return mx.array(np.arange(rows * stride, dtype=np.int32).reshape(rows, stride))


def head_slots(slots: mx.array, n: int, block: int) -> mx.array:
    """slots int32 [rows, k] as the slots of each head, [rows · n, k], row by row then head; see CacheIndex.heads."""
    head = (mx.arange(slots.shape[0] * n, dtype=mx.int32) % n)[:, None]
    slots = mx.repeat(slots, n, axis=0)
    inside = (slots >= 0) & (slots < INT32_MAX // (n * block) * block)
    return mx.where(inside, (slots // block * n + head) * block + slots % block, -1)


def at(index: CacheIndex) -> mx.array:
    """The tokens' positions int32 [batch, seq], negative for all of a lane whose row is outside the table."""
    if index._row is None or index._table is None:
        return index._pos
    inside = (index._row >= 0) & (index._row < index._table.shape[0])
    return mx.where(inside[:, None], index._pos, -1)


def read_table(index: CacheIndex) -> mx.array:
    """The table whose slots the pools are, of positions or of blocks, lane by lane: int32 [batch, columns]."""
    table = index._table if index._every == 1 else dict(index._blocks)[index._every]
    assert table is not None
    return table if index._row is None else mx.take(table, mx.clip(index._row, 0, table.shape[0] - 1), axis=0)


def mask(index: CacheIndex) -> mx.array:
    """Which columns each token sees: bool [batch, seq, context], or [batch, seq, k] of those it chose."""
    tokens, window, chosen = index._at, index._window, index._columns
    if index._table is None and index._every == 1:
        seen = _sees(tokens[:, None, :], tokens[:, :, None], window)
        if index._case == "packed":  # sequences of one lane differ in the token that begins them
            start = mx.arange(index.seq, dtype=mx.int32) - tokens
            seen = seen & (start[:, None, :] == start[:, :, None])
        return (
            seen
            if chosen is None
            else mx.take_along_axis(seen, _inside(chosen, index.seq), axis=2) & _is_in(chosen, index)
        )
    if chosen is not None:
        at_columns = stands(_inside(chosen, index.context), index._every)
        return _sees(at_columns, tokens[:, :, None], window) & _is_in(chosen, index)
    before = _sees(places(index)[..., None, :], tokens[:, :, None], window)
    if index._sees is None:
        return before
    before = before & (places(index)[..., None, :] < _least(tokens)[:, :, None])
    own = _sees(tokens[:, None, :], tokens[:, :, None], window) & index._sees
    return mx.concatenate([before, own], axis=2)


def live(index: CacheIndex) -> mx.array:
    """Which of the columns that are read some token sees: bool, as sources."""
    if index._columns is not None:
        return index._mask
    if index._table is None:
        return _closing(index)[1]
    return index._mask[..., : index._read_table.shape[1]].any(axis=1)


def targets(index: CacheIndex) -> mx.array:
    """The slot each token stores at, int32 [batch · seq], -1 for none."""
    tokens, every = index._at, index._every
    if index._slots is not None:
        return mx.where(tokens >= 0, index._slots, -1).reshape(-1)
    own = tokens if every == 1 else mx.where((tokens >= 0) & (tokens % every == every - 1), tokens // every, -1)
    width = index._read_table.shape[1]
    if index._ring:
        own = mx.where(own >= 0, own % width, -1)
    if index._stride is not None and every == 1 and index._row is None:  # one run of slots after another
        slots = own + index._stride * mx.arange(index.batch, dtype=mx.int32)[:, None]
    else:
        slots = mx.take_along_axis(index._read_table, _inside(own, width), axis=1)
    return mx.where((own >= 0) & (own <= last(width)), slots, -1).reshape(-1)


def sources(index: CacheIndex) -> mx.array:
    """The slot of each column read, int32 [batch, columns] or [batch, seq, k]; of a whole index, the token."""
    if index._table is not None:
        return _chosen(index, index._read_table)
    tokens = mx.broadcast_to(mx.arange(index.seq, dtype=mx.int32), (index.batch, index.seq))
    tokens = _chosen(index, tokens if index._every == 1 else _closing(index)[0])
    return tokens + index.seq * mx.arange(index.batch, dtype=mx.int32).reshape(-1, *(1,) * (tokens.ndim - 1))


def own_sources(index: CacheIndex) -> mx.array:
    """sources [batch, columns], with the lane's first slot, of a ring its newest, in place of those no token sees."""
    slots = sources(index)
    # A ring may have no slot at its first column.
    one = (
        mx.take_along_axis(slots, mx.maximum(_newest(index), 0) % slots.shape[1], axis=1)
        if index._ring
        else slots[:, :1]
    )
    return mx.maximum(mx.where(live(index), slots, one), 0)


def places(index: CacheIndex) -> mx.array:
    """The position at which each column stands, a draft's own aside: int32 [columns], of a ring [batch, columns]."""
    width = index.context if index._sees is None else index._read_table.shape[1]
    columns = mx.arange(width, dtype=mx.int32)
    if not index._ring:
        return stands(columns, index._every)
    tokens, window = 1 if index._sees is not None else index.seq, index._window
    if window is None or window + tokens - 1 > width:
        found = f"a ring of {width} columns, {'no window' if window is None else f'a window of {window}'}"
        raise CacheError(
            "CacheIndex.mask", f"{found} and {tokens} tokens", "a ring of the window and the tokens beside it"
        )
    newest = _newest(index)
    return newest - (newest - columns) % width


def _newest(index: CacheIndex) -> mx.array:
    """The greatest position of the lane that the table holds, int32 [batch, 1]: of its tokens, or before a draft."""
    return index._at.max(axis=1, keepdims=True) if index._sees is None else _least(index._at) - 1


def _least(tokens: mx.array) -> mx.array:
    """The least position of each lane's tokens, int32 [batch, 1], INT32_MAX where there is none."""
    return mx.where(tokens >= 0, tokens, INT32_MAX).min(axis=1, keepdims=True)


def _sees(places: mx.array, tokens: mx.array, window: int | None) -> mx.array:
    """Whether tokens at positions see columns standing at places, broadcast; padding neither sees nor is seen."""
    seen = (places >= 0) & (places <= tokens)
    return seen if window is None else seen & (places > tokens - min(window, INT32_MAX))


def stands(columns: mx.array, every: int) -> mx.array:
    """The position each column stands at: its own, or the last one of its block."""
    return columns if every == 1 else columns * every + (every - 1)


def last(width: int) -> mx.array:
    """width - 1, int32 [1], as an array that is made: a constant would be part of the kernels that it is compiled into,
    and each width of a table would build its own."""
    return mx.arange(width - 1, width, dtype=mx.int32)


def _inside(columns: mx.array, width: int) -> mx.array:
    return mx.clip(columns, 0, last(width))


def _is_in(columns: mx.array, index: CacheIndex) -> mx.array:
    return (columns >= 0) & (columns <= last(index.context))


def _chosen(index: CacheIndex, table: mx.array) -> mx.array:
    """table [batch, columns], or under a selection what it has at the columns each token chose, [batch, seq, k]."""
    if index._columns is None:
        return table
    flat = _inside(index._columns, table.shape[1]).reshape(index.batch, -1)
    return mx.take_along_axis(table, flat, axis=1).reshape(index._columns.shape)


def _closing(index: CacheIndex) -> tuple[mx.array, mx.array]:
    """Of a whole index: the token that closes each block, int32 [batch, blocks], and whether the lane has it.

    Lanes are padded on the left, so the token at position p is p tokens after the lane's first.
    """
    blocks = stands(mx.arange(index.context, dtype=mx.int32), index._every)
    token = blocks + (index.seq - 1 - index._at[:, -1:])
    return _inside(token, index.seq), token < index.seq
