"""A ring against a table of all positions: each token sees the same values at the same positions, however long it goes."""

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


def visible_values(mask: np.ndarray, stands: np.ndarray, values: np.ndarray) -> list[list[tuple[int, bytes]]]:
    """What each token of a lane sees: positions, and the bits of what is there. mask [seq, columns]."""
    return [sorted((int(stands[j]), values[j].tobytes()) for j in np.flatnonzero(shows)) for shows in mask]


class RingSequences:
    """Sequences of several lengths, and what each of their positions holds: in a Brute over all of them, and in slots of
    a ring, runs of `width` or pages of a few slots, where every other slot is NaN."""

    def __init__(self, rng: np.random.Generator, rows: int, width: int, window: int, block: int | None):
        self.rng, self.width, self.window, self.block = rng, width, window, block
        self.values_of_row: list[list[np.ndarray]] = [[] for _ in range(rows)]
        if block is None:
            self.pool = np.full((rows * width, DIM), np.nan, np.float32)
        else:
            blocks = rows * (-(-width // block) + 2)
            self.slots = BlockManager(blocks * block, block)
            self.sequences = [self.slots.open()[0] for _ in range(rows)]
            self.pool = np.full((blocks * block, DIM), np.nan, np.float32)

    def index(self, pos: np.ndarray) -> CacheIndex:
        if self.block is None:
            index = CacheIndex.rows(self.width, [0] * len(self.values_of_row)).with_positions(pos)
        else:
            index = CacheIndex.make(pos, self.slots.table(self.sequences, self.width, ring=True))
        return index.as_ring().window(self.window)

    def reference(self, pos: np.ndarray, values: np.ndarray) -> tuple[ReferenceIndex, np.ndarray]:
        """The Brute of the call over tables of all positions, and the pool before it."""
        longest = max(map(len, self.values_of_row)) + pos.shape[1]
        table = np.arange(len(self.values_of_row) * longest).reshape(-1, longest)
        pool = np.full((table.size, DIM), np.nan, np.float32)
        for row, held in enumerate(self.values_of_row):
            pool[table[row, : len(held)]] = np.reshape(held, (-1, DIM))
        return ReferenceIndex("tabled", pos.tolist(), table.tolist(), window=self.window), pool

    def random_call(self, counts: list[int], seq: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions [rows, seq] and values of the next tokens of each row, padding on a random side."""
        pos = np.full((len(counts), seq), -1)
        for row, count in enumerate(counts):
            at = int(self.rng.integers(0, seq - count + 1))
            pos[row, at : at + count] = len(self.values_of_row[row]) + np.arange(count)
        return pos, self.rng.standard_normal((len(counts), seq, DIM)).astype(np.float32)

    def allocate(self, counts: list[int]) -> None:
        if self.block is not None:
            for sequence, count in zip(self.sequences, counts, strict=True):
                self.slots.free_before(sequence, max(0, self.slots.length(sequence) - self.window))
                assert not self.slots.append(sequence, count)
            held = self.slots.table(self.sequences, max(1, *map(self.slots.length, self.sequences)), ring=True)
            free = np.setdiff1d(np.arange(len(self.pool)), held)
            self.pool[free] = np.nan

    def assert_equal_reads(
        self, index: CacheIndex, brute: ReferenceIndex, values: np.ndarray, pool: np.ndarray
    ) -> None:
        """Stores and reads by both, and compares what each token sees."""
        wanted, _ = brute.extend(values, pool)
        found, after = index.extend(values, self.pool)
        for row, (mask, other) in enumerate(zip(np.array(index.mask()), brute.mask(), strict=True)):
            places = np.array([place if place is not None else -1 for _, _, place in brute.columns_of(row)])
            own = np.array(index.column_positions())[row]
            assert visible_values(mask, own, np.array(found)[row]) == visible_values(other, places, wanted[row])
        assert np.array_equal(np.array(index.positions()), np.maximum(brute.pos, 0))
        if self.block is not None and index.draft_mask is None:
            # Unseen columns hold something of the lane's own: never NaN, which a weight of zero would keep.
            lanes = [any(p >= 0 for p in lane) for lane in brute.pos]
            assert np.isfinite(np.array(index.read(after, zero_unseen=False))[lanes]).all()
        self.pool = np.array(after)  # a copy

    def append_values(self, pos: np.ndarray, values: np.ndarray) -> None:
        for row, lane in enumerate(pos):
            self.values_of_row[row] += [values[row, i] for i in np.flatnonzero(lane >= 0)]


@settings(max_examples=150)
@given(data=st.data(), window=st.integers(1, 6), spare=st.integers(0, 4), block=st.sampled_from([None, 1, 3]))
def test_each_token_sees_what_it_would_over_all_positions(data, window, spare, block):
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
    values: np.ndarray, brute: tuple[ReferenceIndex, np.ndarray]
) -> tuple[ReferenceIndex, np.ndarray, np.ndarray]:
    return brute[0], values, brute[1]


@settings(max_examples=80)
@given(data=st.data(), window=st.integers(1, 6), spare=st.integers(0, 3), guesses=st.integers(1, 6))
def test_a_draft_sees_the_window_before_it_and_its_own_path(data, window, spare, guesses):
    """More guesses than the ring has columns beside the window: they have none of it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = RingSequences(rng, 2, window + spare, window, 1)
    for _ in range(int(rng.integers(1, 3 * window))):
        rows.allocate([1, 1])
        pos, values = rows.random_call([1, 1], 1)
        rows.assert_equal_reads(rows.index(pos), *_reorder(values, rows.reference(pos, values)))
        rows.append_values(pos, values)
    depths = np.stack([[0, *(int(rng.integers(0, i + 1)) + 1 for i in range(guesses - 1))] for _ in range(2)])
    pos = np.array([[len(held)] for held in rows.values_of_row]) + depths
    sees = rng.random((2, guesses, guesses)) < 0.6
    values = rng.standard_normal((2, guesses, DIM)).astype(np.float32)
    brute, pool = rows.reference(pos, values)
    pool = np.concatenate([pool, np.full((2 * guesses, DIM), np.nan, np.float32)])
    slots = len(pool) - 2 * guesses + np.arange(2 * guesses).reshape(2, guesses)
    brute = replace(brute, slots=slots.tolist(), sees=sees.tolist())
    at = len(rows.pool) + np.arange(2 * guesses).reshape(2, guesses)
    rows.pool = np.concatenate([rows.pool, np.full((2 * guesses, DIM), np.nan, np.float32)])
    rows.assert_equal_reads(rows.index(pos).draft(at, sees), brute, values, pool)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), paged=st.booleans(), heads=st.integers(1, 3))
def test_heads_apart_are_the_ring_of_each(seed, paged, heads):
    rng = np.random.default_rng(seed)
    window, width = 3, 6
    block = 2 if paged else width
    pos = np.array([[7, 8, -1], [2, -1, -1]])
    table = rng.permutation(12).reshape(2, 6) if paged else None
    index = CacheIndex.rows(width, [0, 0]).with_positions(pos) if table is None else CacheIndex.make(pos, table)
    index = index.as_ring().window(window)
    values = rng.standard_normal((2, heads, 3, DIM)).astype(np.float32)
    pools = rng.standard_normal((heads, 12, DIM)).astype(np.float32)
    apart = pools.reshape(heads, 12 // block, block, DIM).swapaxes(0, 1).reshape(-1, DIM)
    seen, after = index.for_heads(heads, block).extend(values.reshape(-1, 3, DIM), apart)
    seen = np.array(seen).reshape(2, heads, width, DIM)
    after = np.array(after).reshape(12 // block, heads, block, DIM).swapaxes(0, 1).reshape(heads, 12, DIM)
    for head in range(heads):
        one, pool = index.extend(values[:, head], pools[head])
        assert np.array_equal(seen[:, head], np.array(one))
        assert np.array_equal(after[head], np.array(pool))


def test_its_walk_says_it_and_comes_back():
    index = CacheIndex.rows(6, [0]).with_positions([[9]])
    ring = index.as_ring().window(3)
    assert ring.walk()[0] != index.window(3).walk()[0]
    again = CacheIndex.from_walk(*ring.walk())
    assert again.walk()[0] == ring.walk()[0]
    assert np.array_equal(np.array(again.mask()), np.array(ring.mask()))
    assert again.column_positions().tolist() == [[6, 7, 8, 9, 4, 5]]
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
def test_what_cannot_be_right_is_refused(make, match):
    with pytest.raises(CacheError, match=match):
        make(CacheIndex.rows(6, [0]).with_positions([[9]]).as_ring())
