"""Every argument that the specification calls invalid, and the message of its error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.cache import CacheError, CacheIndex

make, rows, whole, packed = CacheIndex.make, CacheIndex.rows, CacheIndex.whole, CacheIndex.packed
every_index = make([[0, 1]], [[3, 4, 5]], every=[(2, [[0, 1]])])
table_index = make([[0, 1]], [[3, 4, 5]])
selected_columns = np.zeros((1, 2, 1), int)
sees = np.ones((1, 2, 2), bool)
draft_index = table_index.draft([[6, 7]], sees)
pool = np.zeros((8, 2), np.float32)
values = np.zeros((1, 2, 2), np.float32)

INVALID = {
    "make: pos of one axis": (lambda: make([0], [[1]]), "pos"),
    "make: table of three axes": (lambda: make([[0]], [[[1]]]), "table"),
    "make: no batch row": (lambda: make(np.zeros((0, 1), int), np.zeros((0, 1), int)), "pos"),
    "make: no token": (lambda: make(np.zeros((1, 0), int), [[1]]), "pos"),
    "make: no column": (lambda: make([[0]], np.zeros((1, 0), int)), "table"),
    "make: no table row": (lambda: make([[0]], np.zeros((0, 1), int), row=[0]), "table"),
    "make: table rows other than batch rows": (lambda: make([[0]], [[1], [2]]), "2 rows"),
    "make: row of another length": (lambda: make([[0]], [[1]], row=[0, 0]), "row"),
    "make: row of two axes": (lambda: make([[0]], [[1]], row=[[0]]), "row"),
    "make: floats": (lambda: make([[0.0]], [[1]]), "float64"),
    "make: MLX floats": (lambda: make([[0]], mx.zeros((1, 1))), "float32"),
    "make: booleans": (lambda: make([[True]], [[1]]), "bool"),
    "make: ragged": (lambda: make([[0], [1, 2]], [[1]]), "lengths"),
    "make: entry of 1": (lambda: make([[0]], [[1]], every=[(1, [[0]])]), "at least 2"),
    "make: entry twice": (lambda: make([[0]], [[1]], every=[(2, [[0]]), (2, [[0]])]), "each size once"),
    "make: entries of other rows": (lambda: make([[0]], [[1]], every=[(2, [[0], [1]])]), "entries of 2"),
    "make: entries empty": (lambda: make([[0]], [[1]], every=[(2, np.zeros((1, 0), int))]), "entries of 2"),
    "make: no pair": (lambda: make([[0]], [[1]], every=[2]), "pairs"),
    "rows: no rows": (lambda: rows(4, []), "no rows"),
    "rows: context 0": (lambda: rows(0, [0]), "context"),
    "rows: length below 0": (lambda: rows(4, [-1]), "lens"),
    "rows: length past the context": (lambda: rows(4, [1, 5]), r"lens\[1\]"),
    "rows: more slots than int32 numbers": (lambda: rows(2**30, [1, 1]), "2 rows of 1073741824 slots"),
    "rows: a number for a list": (lambda: rows(4, 3), "list of lengths"),
    "rows: a fraction": (lambda: rows(4, [1.5]), "integer"),
    "rows: entry of 1": (lambda: rows(4, [1], every=[1]), "at least 2"),
    "rows: entry twice": (lambda: rows(4, [1], every=[3, 3]), "each size once"),
    "whole: no rows": (lambda: whole(0, 1), "batch"),
    "whole: no token": (lambda: whole(1, 0), "seq"),
    "whole: length past seq": (lambda: whole(1, 2, [3]), "lens"),
    "whole: length below 0": (lambda: whole(1, 2, [-1]), "lens"),
    "whole: other rows": (lambda: whole(2, 2, [1]), "1 lengths"),
    "packed: no rows": (lambda: packed(3, []), "no rows"),
    "packed: no token": (lambda: packed(0, [[1]]), "seq"),
    "packed: length below 0": (lambda: packed(3, [[1, -1]]), r"lens\[0\]\[1\]"),
    "packed: more than seq": (lambda: packed(3, [[1], [2, 2]]), "4 tokens"),
    "packed: a number for a row": (lambda: packed(3, [1]), "list of lengths"),
    "packed: a number for a list": (lambda: packed(3, 1), "lengths"),
    "window: 0": (lambda: table_index.window(0), "window"),
    "window: true": (lambda: table_index.window(True), "window"),
    "select: two axes": (lambda: table_index.select([[0, 1]]), "columns"),
    "select: other tokens": (lambda: table_index.select(np.zeros((1, 3, 1), int)), "columns"),
    "select: k 0": (lambda: table_index.select(np.zeros((1, 2, 0), int)), "columns"),
    "select: a draft": (lambda: draft_index.select(selected_columns), "draft"),
    "draft: slots of another shape": (lambda: table_index.draft([[6]], sees), "slots"),
    "draft: sees of another shape": (lambda: table_index.draft([[6, 7]], sees[:, :1]), "sees"),
    "draft: sees of integers": (lambda: table_index.draft([[6, 7]], sees.astype(int)), "booleans"),
    "draft: whole": (lambda: whole(1, 2).draft([[6, 7]], sees), "over a table"),
    "draft: packed": (lambda: packed(2, [[2]]).draft([[6, 7]], sees), "over a table"),
    "draft: entries": (lambda: every_index.every(2).draft([[6, 7]], sees), "of single positions"),
    "draft: a selection": (lambda: table_index.select(selected_columns).draft([[6, 7]], sees), "selection"),
    "every: 0": (lambda: table_index.every(0), "at least 1"),
    "every: no such table": (lambda: every_index.every(3), r"\[2\]"),
    "every: no table": (lambda: table_index.every(2), r"\[\]"),
    "every: entries of another size": (lambda: every_index.every(2).every(3), "positions"),
    "every: back to positions": (lambda: every_index.every(2).every(1), "positions"),
    "every: a selection": (lambda: every_index.select(selected_columns).every(2), "selection"),
    "every: a draft": (lambda: every_index.draft([[6, 7]], sees).every(2), "draft"),
    "every: packed": (lambda: packed(2, [[2]]).every(2), "unpacked"),
    "advance: whole": (lambda: whole(1, 2).advance(), "writes nothing"),
    "advance: packed": (lambda: packed(2, [[2]]).advance(), "writes nothing"),
    "with_positions: other rows": (lambda: table_index.with_positions([[0], [1]]), "with_positions: pos"),
    "with_positions: whole": (lambda: whole(1, 2).with_positions([[0]]), "over a table"),
    "limit_context: 0": (lambda: table_index.limit_context(0), "limit_context"),
    "limit_context: more columns": (lambda: table_index.limit_context(4), "at most 3"),
    "limit_context: whole": (lambda: whole(1, 2).limit_context(1), "over a table"),
    "for_heads: no heads": (lambda: table_index.for_heads(0, 8), "for_heads: num_heads"),
    "for_heads: head_span 0": (lambda: table_index.for_heads(2, 0), "for_heads: head_span"),
    "for_heads: past int32": (lambda: table_index.for_heads(2, 2**30), "at most"),
    "for_key_value_pool: below 0": (lambda: table_index.for_key_value_pool(-1), "for_key_value_pool: value_offset"),
    "for_key_value_pool: past int32": (
        lambda: table_index.for_key_value_pool(2**30 + 1),
        "for_key_value_pool: value_offset",
    ),
    "for_key_value_pool: entries": (lambda: every_index.for_key_value_pool(4), "tables of entries"),
    "extend: another width": (lambda: table_index.extend(values[:, :, :1], pool), r"\[1, 2, 2\]"),
    "extend: other tokens": (lambda: table_index.extend(values[:, :1], pool), r"\[1, 2, 2\]"),
    "extend: another dtype": (lambda: table_index.extend(values.astype(np.float16), pool), "float16"),
    "extend: no slot axis": (lambda: table_index.extend(values, np.float32(0)), "axis of slots"),
    "extend: whole, another width": (lambda: whole(1, 2).extend(values[:, :, :1], pool), r"\[1, 2, 2\]"),
    "write: another width": (lambda: table_index.write(values[:, :, :1], pool), r"\[1, 2, 2\]"),
    "read: a draft": (lambda: draft_index.read(pool), "extend"),
    "read: whole": (lambda: whole(1, 2).read(pool), "extend"),
    "place: no device": (lambda: table_index.place("cpu"), "stream"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_argument_raises_an_error_that_names_it(name: str):
    act, message = INVALID[name]
    with pytest.raises(ValueError, match=message) as raised:
        act()
    assert isinstance(raised.value, CacheError)
    assert raised.value.where.startswith("CacheIndex.")
    assert raised.value.expected


VALID = {
    "every 1 of a constructor's index": lambda: [
        i.every(1) for i in (table_index, draft_index, packed(2, [[2]]), whole(1, 2))
    ],
    "every of the size it reads, also under a selection": lambda: [
        every_index.every(2).select(selected_columns).every(2)
    ],
    "draft over a draft": lambda: [draft_index.draft([[1, 2]], sees)],
    "window over a draft": lambda: [draft_index.window(2)],
    "selection in entries, on packed, over a selection": lambda: [
        every_index.every(2).select(selected_columns),
        packed(2, [[2]]).select(selected_columns),
        table_index.select(selected_columns).select(selected_columns),
    ],
    "a row of no tokens": lambda: [rows(3, [0]), whole(1, 1, [0]), packed(1, [[]]), packed(1, [[0]])],
    "numpy numbers": lambda: [
        rows(np.int64(3), np.array([1, 2])),
        whole(np.int32(1), np.int8(2)),
        table_index.window(np.int64(1)),
    ],
    "MLX lengths": lambda: [rows(3, mx.array([1, 2]))],
}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_argument_does_not_raise(name: str):
    for index in VALID[name]():
        assert index.mask().shape[:2] == (index.batch, index.seq)


def test_every_of_the_same_size_is_the_index_itself():
    assert table_index.every(1) is table_index
    index_of_entries = every_index.every(2)
    assert index_of_entries.every(2) is index_of_entries


def test_an_index_is_immutable():
    with pytest.raises(AttributeError):
        table_index.window_size = 3  # type: ignore[misc]
