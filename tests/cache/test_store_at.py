"""A whole or packed index that keeps its tokens: seen as without, and stored at the slots that are named."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.cache import CacheError, CacheIndex


def random_packed_index(data) -> tuple[CacheIndex, np.ndarray]:
    """An index of lanes of several sequences, and distinct slots for some of its tokens, below 40."""
    lanes = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=3), label="lanes")
    seq = max(1, *map(sum, lanes)) + data.draw(st.integers(0, 2), label="padding")
    index = CacheIndex.packed(seq, lanes)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    slots = draw.permutation(40)[: len(lanes) * seq].reshape(len(lanes), seq)
    slots = np.where(draw.random(slots.shape) < 0.2, draw.choice([-1, 40, 99], slots.shape), slots)
    return index, slots


@settings(max_examples=100)
@given(data=st.data(), window=st.sampled_from([None, 1, 2]), spare=st.booleans(), selected=st.booleans())
def test_it_sees_what_it_saw_and_stores_where_it_is_told(data, window, spare, selected):
    index, slots = random_packed_index(data)
    index = index if window is None else index.window(window)
    if selected:
        index = index.select(
            np.arange(index.batch * index.seq * 2).reshape(index.batch, index.seq, 2) % (index.seq + 1)
        )
    keeps = index.store_at(slots)
    keeps = keeps.with_spare_row(40) if spare else keeps
    values = np.random.default_rng(1).normal(size=(index.batch, index.seq, 3)).astype(np.float32)
    pool = np.full((40 + spare, 3), np.nan, np.float32)
    (seen, after), (wanted, same) = (i.extend(mx.array(values), mx.array(pool)) for i in (keeps, index))
    assert np.array_equal(np.array(seen), np.array(wanted))
    assert np.array_equal(np.array(same), pool, equal_nan=True)
    assert np.array_equal(np.array(keeps.mask()), np.array(index.mask()))
    assert (keeps.context, keeps.positions().tolist()) == (index.context, index.positions().tolist())
    for b, i in np.ndindex(slots.shape):
        if index.token_positions[b, i].item() >= 0 and 0 <= slots[b, i] < 40:
            pool[slots[b, i]] = values[b, i]
    assert np.array_equal(np.array(after)[:40], pool[:40], equal_nan=True)
    assert np.array_equal(np.array(keeps.write(mx.array(values), same))[:40], pool[:40], equal_nan=True)


@settings(max_examples=50)
@given(data=st.data(), block=st.sampled_from([1, 4, 40]))
def test_with_heads_apart_each_head_is_stored_in_its_own_row(data, block):
    index, slots = random_packed_index(data)
    values = np.random.default_rng(2).normal(size=(index.batch, 2, index.seq, 3)).astype(np.float32)
    flat = mx.array(values.reshape(-1, index.seq, 3))
    seen, after = index.store_at(slots).for_heads(2, block).extend(flat, mx.zeros((80, 3)))
    assert np.array_equal(np.array(seen), np.array(flat))
    wanted = np.zeros((40 // block, 2, block, 3), np.float32)
    for b, i in np.ndindex(slots.shape):
        if index.token_positions[b, i].item() >= 0 and 0 <= slots[b, i] < 40:
            wanted[slots[b, i] // block, :, slots[b, i] % block] = values[b, :, i]
    assert np.array_equal(np.array(after), wanted.reshape(80, 3))


def test_walk_says_it():
    index = CacheIndex.packed(4, [[2, 2]])
    keeps = index.store_at([[3, 1, 0, 7]])
    assert keeps.walk()[0] != index.walk()[0]
    again = CacheIndex.from_walk(*keeps.walk())
    assert again.walk()[0] == keeps.walk()[0]
    assert [a.tolist() for a in again.walk()[1]] == [a.tolist() for a in keeps.walk()[1]]
    assert repr(keeps) == "CacheIndex(packed, batch=1, seq=4, context=4, store)"
    with pytest.raises(CacheError, match="from_walk"):
        CacheIndex.from_walk(keeps.walk()[0], index.walk()[1])


def test_a_column_of_a_whole_index_stands_at_its_tokens_position():
    assert CacheIndex.packed(5, [[2, 2]]).column_positions().tolist() == [[-1, 0, 1, 0, 1]]
    with pytest.raises(CacheError, match="column_positions"):
        CacheIndex.whole(1, 4).every(2).column_positions()


@pytest.mark.parametrize(
    ("index", "slots", "match"),
    [
        (CacheIndex.rows(4, [2]), [[0, 1]], "whole or packed"),
        (CacheIndex.whole(1, 4).every(2), [[0, 1, 2, 3]], "not in blocks"),
        (CacheIndex.whole(1, 4), [[0, 1]], r"shape \[1, 2\]"),
        (CacheIndex.whole(1, 2), [[0.5, 1]], "integers"),
    ],
)
def test_what_cannot_keep_is_refused(index, slots, match):
    with pytest.raises(CacheError, match=match):
        index.store_at(slots)


def test_it_reads_no_blocks():
    with pytest.raises(CacheError, match="every"):
        CacheIndex.whole(1, 4).store_at([[0, 1, 2, 3]]).every(2)
