"""Rings against tables of all positions: each token attends to the same values, however long the sequence."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_index import ReferenceIndex

from mlx_transmuter.cache import BlockManager, CacheError, CacheIndex

DIM = 2


def visible_values(mask: np.ndarray, positions: np.ndarray, values: np.ndarray) -> list[list[tuple[int, bytes]]]:
    """The positions that each token of a row attends to, and the bits of the values there. mask [seq, columns]."""
    return [sorted((int(positions[j]), values[j].tobytes()) for j in np.flatnonzero(columns)) for columns in mask]


class RingSequences:
    """Sequences of several lengths and the value at each position: for a ReferenceIndex over all positions, and in the
    slots of rings, `width` contiguous slots or blocks of a few, where every other slot is NaN."""

    def __init__(self, rng: np.random.Generator, rows: int, width: int, window: int, block: int | None):
        self.rng, self.width, self.window, self.block = rng, width, window, block
        self.values_of_row: list[list[np.ndarray]] = [[] for _ in range(rows)]
        if block is None:
            self.pool = np.full((rows * width, DIM), np.nan, np.float32)
        else:
            blocks = rows * (-(-width // block) + 2)
            self.manager = BlockManager(blocks * block, block)
            self.sequences = [self.manager.open()[0] for _ in range(rows)]
            self.pool = np.full((blocks * block, DIM), np.nan, np.float32)

    def index(self, pos: np.ndarray) -> CacheIndex:
        if self.block is None:
            index = CacheIndex.rows(self.width, [0] * len(self.values_of_row)).with_positions(pos)
        else:
            index = CacheIndex.make(pos, self.manager.table(self.sequences, self.width, ring=True))
        return index.as_ring().window(self.window)

    def reference(self, pos: np.ndarray, values: np.ndarray) -> tuple[ReferenceIndex, np.ndarray]:
        """The reference of the call over tables of all positions, and the pool before it."""
        longest = max(map(len, self.values_of_row)) + pos.shape[1]
        table = np.arange(len(self.values_of_row) * longest).reshape(-1, longest)
        pool = np.full((table.size, DIM), np.nan, np.float32)
        for row, values_of_row in enumerate(self.values_of_row):
            pool[table[row, : len(values_of_row)]] = np.reshape(values_of_row, (-1, DIM))
        return ReferenceIndex("tabled", pos.tolist(), table.tolist(), window=self.window), pool

    def random_call(self, counts: list[int], seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions [rows, seq] and values of the next tokens of each row, padding on a random side."""
        pos = np.full((len(counts), seq), -1)
        for row, count in enumerate(counts):
            start = int(self.rng.integers(0, seq - count + 1))
            pos[row, start : start + count] = len(self.values_of_row[row]) + np.arange(count)
        return pos, self.rng.standard_normal((len(counts), seq, DIM)).astype(np.float32)

    def allocate(self, counts: list[int]) -> None:
        if self.block is not None:
            for sequence, count in zip(self.sequences, counts, strict=True):
                self.manager.free_before(sequence, max(0, self.manager.length(sequence) - self.window))
                assert not self.manager.append(sequence, count)
            length = max(1, *map(self.manager.length, self.sequences))
            used = self.manager.table(self.sequences, length, ring=True)
            free = np.setdiff1d(np.arange(len(self.pool)), used)
            self.pool[free] = np.nan

    def assert_equal_reads(
        self, index: CacheIndex, reference: ReferenceIndex, values: np.ndarray, pool: np.ndarray
    ) -> None:
        """Extends both and compares what each token attends to."""
        expected_seen, _ = reference.extend(values, pool)
        seen, new_pool = index.extend(values, self.pool)
        for row, (mask, expected_mask) in enumerate(zip(np.array(index.mask()), reference.mask(), strict=True)):
            columns = reference.columns_of(row)
            expected_positions = np.array([-1 if position is None else position for _, _, position in columns])
            expected = visible_values(expected_mask, expected_positions, expected_seen[row])
            assert visible_values(mask, np.array(index.column_positions())[row], np.array(seen)[row]) == expected
        assert np.array_equal(np.array(index.positions()), np.maximum(reference.pos, 0))
        if self.block is not None and index.ancestor_mask is None:
            # Other columns read a slot of the same row: never NaN, which a weight of zero would not remove.
            rows = [any(position >= 0 for position in row) for row in reference.pos]
            assert np.isfinite(np.array(index.read(new_pool, zero_unseen=False))[rows]).all()
        self.pool = np.array(new_pool)  # a copy

    def append_values(self, pos: np.ndarray, values: np.ndarray) -> None:
        for row, positions in enumerate(pos):
            self.values_of_row[row] += [values[row, i] for i in np.flatnonzero(positions >= 0)]


@settings(max_examples=150)
@given(data=st.data(), window=st.integers(1, 6), spare=st.integers(0, 4), block=st.sampled_from([None, 1, 3]))
def test_each_token_attends_as_over_a_table_of_all_positions(data, window, spare, block):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = RingSequences(rng, data.draw(st.integers(1, 3)), window + spare, window, block)
    for _ in range(data.draw(st.integers(1, 8))):
        seq = int(rng.integers(1, spare + 2))
        counts = rng.integers(0, seq + 1, len(rows.values_of_row)).tolist()
        rows.allocate(counts)
        pos, values = rows.random_call(counts, seq)
        rows.assert_equal_reads(rows.index(pos), *_reorder(values, rows.reference(pos, values)))
        rows.append_values(pos, values)


def _reorder(
    values: np.ndarray, reference: tuple[ReferenceIndex, np.ndarray]
) -> tuple[ReferenceIndex, np.ndarray, np.ndarray]:
    return reference[0], values, reference[1]


@settings(max_examples=80)
@given(data=st.data(), window=st.integers(1, 6), spare=st.integers(0, 3), draft_tokens=st.integers(1, 6))
def test_a_draft_attends_to_the_window_before_it_and_its_own_path(data, window, spare, draft_tokens):
    """Also with more draft tokens than the ring has columns beside the window, for they use none of its columns."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = RingSequences(rng, 2, window + spare, window, 1)
    for _ in range(int(rng.integers(1, 3 * window))):
        rows.allocate([1, 1])
        pos, values = rows.random_call([1, 1], 1)
        rows.assert_equal_reads(rows.index(pos), *_reorder(values, rows.reference(pos, values)))
        rows.append_values(pos, values)
    depths = np.stack([[0, *(int(rng.integers(0, i + 1)) + 1 for i in range(draft_tokens - 1))] for _ in range(2)])
    pos = np.array([[len(values)] for values in rows.values_of_row]) + depths
    sees = rng.random((2, draft_tokens, draft_tokens)) < 0.6
    values = rng.standard_normal((2, draft_tokens, DIM)).astype(np.float32)
    reference, pool = rows.reference(pos, values)
    pool = np.concatenate([pool, np.full((2 * draft_tokens, DIM), np.nan, np.float32)])
    slots = len(pool) - 2 * draft_tokens + np.arange(2 * draft_tokens).reshape(2, draft_tokens)
    reference = replace(reference, slots=slots.tolist(), sees=sees.tolist())
    draft_slots = len(rows.pool) + np.arange(2 * draft_tokens).reshape(2, draft_tokens)
    rows.pool = np.concatenate([rows.pool, np.full((2 * draft_tokens, DIM), np.nan, np.float32)])
    rows.assert_equal_reads(rows.index(pos).draft(draft_slots, sees), reference, values, pool)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), paged=st.booleans(), heads=st.integers(1, 3))
def test_each_head_of_a_pool_is_a_ring_of_its_own(seed, paged, heads):
    rng = np.random.default_rng(seed)
    window, width = 3, 6
    head_span = 2 if paged else width
    pos = np.array([[7, 8, -1], [2, -1, -1]])
    table = rng.permutation(12).reshape(2, 6) if paged else None
    index = CacheIndex.rows(width, [0, 0]).with_positions(pos) if table is None else CacheIndex.make(pos, table)
    index = index.as_ring().window(window)
    values = rng.standard_normal((2, heads, 3, DIM)).astype(np.float32)
    pools = rng.standard_normal((heads, 12, DIM)).astype(np.float32)
    heads_pool = pools.reshape(heads, 12 // head_span, head_span, DIM).swapaxes(0, 1).reshape(-1, DIM)
    seen, new_pool = index.for_heads(heads, head_span).extend(values.reshape(-1, 3, DIM), heads_pool)
    seen = np.array(seen).reshape(2, heads, width, DIM)
    new_pool = np.array(new_pool).reshape(12 // head_span, heads, head_span, DIM).swapaxes(0, 1)
    new_pool = new_pool.reshape(heads, 12, DIM)
    for head in range(heads):
        expected_seen, expected_pool = index.extend(values[:, head], pools[head])
        assert np.array_equal(seen[:, head], np.array(expected_seen))
        assert np.array_equal(new_pool[head], np.array(expected_pool))


def test_walk_reports_the_ring_and_from_walk_rebuilds_it():
    index = CacheIndex.rows(6, [0]).with_positions([[9]])
    ring = index.as_ring().window(3)
    assert ring.walk()[0] != index.window(3).walk()[0]
    rebuilt = CacheIndex.from_walk(*ring.walk())
    assert rebuilt.walk()[0] == ring.walk()[0]
    assert np.array_equal(np.array(rebuilt.mask()), np.array(ring.mask()))
    assert rebuilt.column_positions().tolist() == [[6, 7, 8, 9, 4, 5]]
    assert "ring" in repr(ring)
    assert ring.advance().mask().tolist() == [[[False, False, True, True, True, False]]]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda ring: ring.mask(), "no window"),
        (lambda ring: ring.window(7).mask(), "a window of 7 and 1 tokens"),
        (lambda ring: ring.window(6).with_positions([[9, 10]]).mask(), "a window of 6 and 2 tokens"),
        (
            lambda ring: ring.window(6).with_positions([[9, 10]]).extend(mx.zeros((1, 2, 1)), mx.zeros((6, 1))),
            "2 tokens",
        ),
        (lambda ring: ring.limit_context(3), "no ring"),
        (lambda ring: ring.select([[[0]]]), "a ring"),
        (lambda ring: CacheIndex.whole(1, 2).as_ring(), r"CacheIndex\.as_ring"),
        (lambda ring: CacheIndex.rows(6, [0], [2]).as_ring(), r"CacheIndex\.as_ring"),
        (lambda ring: CacheIndex.rows(6, [0]).limit_context(3).as_ring(), r"CacheIndex\.as_ring"),
    ],
)
def test_an_index_that_cannot_be_a_ring_raises(make, match):
    with pytest.raises(CacheError, match=match):
        make(CacheIndex.rows(6, [0]).with_positions([[9]]).as_ring())
