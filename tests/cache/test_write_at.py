"""write_at: a whole or packed index reads as without it, and its tokens are written at the slots of the argument."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.cache import CacheError, CacheIndex


def random_packed_index(data) -> tuple[CacheIndex, np.ndarray]:
    """An index of rows of several sequences, and distinct slots for some of its tokens, below 40."""
    lens = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3), label="lens")
    seq = max(1, *map(sum, lens)) + data.draw(st.integers(0, 2), label="padding")
    index = CacheIndex.packed(seq, lens)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    slots = rng.permutation(40)[: len(lens) * seq].reshape(len(lens), seq)
    slots = np.where(rng.random(slots.shape) < 0.2, rng.choice([-1, 40, 99], slots.shape), slots)
    return index, slots


@settings(max_examples=100)
@given(data=st.data(), window=st.sampled_from([None, 1, 2]), has_spare_pool_row=st.booleans(), selects=st.booleans())
def test_the_reads_stay_the_same_and_the_tokens_are_written(data, window, has_spare_pool_row, selects):
    index, slots = random_packed_index(data)
    index = index if window is None else index.window(window)
    if selects:
        index = index.select(
            np.arange(index.batch * index.seq * 2).reshape(index.batch, index.seq, 2) % (index.seq + 1)
        )
    writing = index.write_at(slots)
    writing = writing.with_spare_pool_row(40) if has_spare_pool_row else writing
    values = np.random.default_rng(1).normal(size=(index.batch, index.seq, 3)).astype(np.float32)
    pool = np.full((40 + has_spare_pool_row, 3), np.nan, np.float32)
    seen, new_pool = writing.extend(mx.array(values), mx.array(pool))
    expected_seen, old_pool = index.extend(mx.array(values), mx.array(pool))
    assert np.array_equal(np.array(seen), np.array(expected_seen))
    assert np.array_equal(np.array(old_pool), pool, equal_nan=True)
    assert np.array_equal(np.array(writing.mask()), np.array(index.mask()))
    assert (writing.context, writing.positions().tolist()) == (index.context, index.positions().tolist())
    for b, i in np.ndindex(slots.shape):
        if index.token_positions[b, i].item() >= 0 and 0 <= slots[b, i] < 40:
            pool[slots[b, i]] = values[b, i]
    assert np.array_equal(np.array(new_pool)[:40], pool[:40], equal_nan=True)
    assert np.array_equal(np.array(writing.write(mx.array(values), old_pool))[:40], pool[:40], equal_nan=True)


@settings(max_examples=50)
@given(data=st.data(), head_span=st.sampled_from([1, 4, 40]))
def test_each_head_is_stored_in_a_row_of_its_own(data, head_span):
    index, slots = random_packed_index(data)
    values = np.random.default_rng(2).normal(size=(index.batch, 2, index.seq, 3)).astype(np.float32)
    flat_values = mx.array(values.reshape(-1, index.seq, 3))
    seen, pool = index.write_at(slots).for_heads(2, head_span).extend(flat_values, mx.zeros((80, 3)))
    assert np.array_equal(np.array(seen), np.array(flat_values))
    expected = np.zeros((40 // head_span, 2, head_span, 3), np.float32)
    for b, i in np.ndindex(slots.shape):
        if index.token_positions[b, i].item() >= 0 and 0 <= slots[b, i] < 40:
            expected[slots[b, i] // head_span, :, slots[b, i] % head_span] = values[b, :, i]
    assert np.array_equal(np.array(pool), expected.reshape(80, 3))


def test_walk_reports_the_writes():
    index = CacheIndex.packed(4, [[2, 2]])
    writing = index.write_at([[3, 1, 0, 7]])
    assert writing.walk()[0] != index.walk()[0]
    rebuilt = CacheIndex.from_walk(*writing.walk())
    assert rebuilt.walk()[0] == writing.walk()[0]
    assert [leaf.tolist() for leaf in rebuilt.walk()[1]] == [leaf.tolist() for leaf in writing.walk()[1]]
    assert repr(writing) == "CacheIndex(packed, batch=1, seq=4, context=4, write)"
    with pytest.raises(CacheError, match="from_walk"):
        CacheIndex.from_walk(writing.walk()[0], index.walk()[1])


def test_a_column_of_a_whole_index_is_at_the_position_of_its_token():
    assert CacheIndex.packed(5, [[2, 2]]).column_positions().tolist() == [[-1, 0, 1, 0, 1]]
    with pytest.raises(CacheError, match="column_positions"):
        CacheIndex.whole(1, 4).every(2).column_positions()


@pytest.mark.parametrize(
    ("index", "slots", "match"),
    [
        (CacheIndex.rows(4, [2]), [[0, 1]], "whole or packed"),
        (CacheIndex.whole(1, 4).every(2), [[0, 1, 2, 3]], "of single positions"),
        (CacheIndex.whole(1, 4), [[0, 1]], r"shape \[1, 2\]"),
        (CacheIndex.whole(1, 2), [[0.5, 1]], "integers"),
    ],
)
def test_an_index_that_cannot_store_raises(index, slots, match):
    with pytest.raises(CacheError, match=match):
        index.write_at(slots)


def test_an_index_that_writes_reads_no_entries():
    with pytest.raises(CacheError, match="every"):
        CacheIndex.whole(1, 4).write_at([[0, 1, 2, 3]]).every(2)
