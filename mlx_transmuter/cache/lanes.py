"""Lanes: the index over pools that keep heads apart, and over pools that hold keys and values one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_transmuter.cache import columns as see
from mlx_transmuter.cache.error import INT32_MAX, CacheError, integer

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex


def of_heads(index: CacheIndex, n: int, block: int) -> CacheIndex:
    """See CacheIndex.heads."""
    n = integer("CacheIndex.heads: n", n, 1)
    block = integer("CacheIndex.heads: block", block, 1, INT32_MAX // n)
    if n == 1:
        return index

    def lanes(values: mx.array | None) -> mx.array | None:
        return None if values is None else mx.repeat(values, n, axis=0)

    def spread(slots: mx.array) -> mx.array:
        return see.head_slots(slots, n, block)

    row = lanes(index._row)
    if row is not None and index._table is not None:
        head = mx.arange(row.shape[0], dtype=mx.int32) % n
        row = mx.where((row >= 0) & (row < index._table.shape[0]), row * n + head, -1)
    runs = index._stride == block and not index._blocks
    return replace(
        index,
        _pos=mx.repeat(index._pos, n, axis=0),
        _table=None if index._table is None else spread(index._table),
        _row=row,
        _blocks=tuple((m, spread(table)) for m, table in index._blocks),
        _columns=lanes(index._columns),
        _slots=None if index._slots is None else spread(index._slots),
        _sees=lanes(index._sees),
        _stride=block if runs else None,
        _narrowed=index._narrowed and runs,
    )


def twice(index: CacheIndex, apart: int) -> CacheIndex:
    """See CacheIndex.twice."""
    apart = integer("CacheIndex.twice: apart", apart, 0, INT32_MAX // 2)
    if index._blocks:
        raise CacheError("CacheIndex.twice", repr(index), "an index without tables of blocks")

    def lanes(values: mx.array | None) -> mx.array | None:
        return None if values is None else mx.concatenate([values, values])

    def both(slots: mx.array | None) -> mx.array | None:
        if slots is None:
            return None
        held = (slots >= 0) & (slots < apart)  # what is outside of the first pool must not reach into the second
        return mx.concatenate([mx.where(held, slots, -1), mx.where(held, slots + apart, -1)])

    row = index._row
    if row is not None and index._table is not None:
        rows = index._table.shape[0]
        held = (row >= 0) & (row < rows)
        row = mx.concatenate([mx.where(held, row, -1), mx.where(held, row + rows, -1)])
    runs = index._stride is not None and index._table is not None and apart == index._table.shape[0] * index._stride
    return replace(
        index,
        _pos=mx.concatenate([index._pos, index._pos]),
        _table=both(index._table),
        _row=row,
        _columns=lanes(index._columns),
        _slots=both(index._slots),
        _sees=lanes(index._sees),
        _stride=index._stride if runs else None,
        _narrowed=index._narrowed and runs,
    )
