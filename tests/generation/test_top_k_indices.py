"""top_k_indices against numpy's sort, over sizes around the borders of blocks, ties and removed scores."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.generation.logits.scores import log_softmax, log_softmax_at
from mlx_transmuter.generation.logits.top_k_indices import top_k_indices


@given(st.data(), st.integers(1, 3), st.integers(1, 700), st.sampled_from([2, 9, 10**6]))
def test_the_indices_are_those_of_a_sort(data, rows, size, values):
    """With few different values many are equal, and some of the others are removed."""
    count = data.draw(st.integers(1, size))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scores = draw.integers(0, values, (rows, size)).astype(np.float32)
    scores[draw.random(scores.shape) < data.draw(st.sampled_from([0, 0.9]))] = -np.inf
    indices = np.array(top_k_indices(mx.array(scores), count))
    assert (indices.dtype, indices.shape) == (np.int32, (rows, count))
    for row, found in zip(scores, indices, strict=True):
        assert len(set(found.tolist())) == count
        assert sorted(row[found]) == sorted(row)[size - count :]


@pytest.mark.parametrize(("size", "count"), [(49152 * 4, 8), (50257, 50), (32000, 2)])
def test_nothing_of_the_size_of_a_vocabulary_is_partitioned(size, count, monkeypatch):
    sizes, partition = [], mx.argpartition
    monkeypatch.setattr(mx, "argpartition", lambda x, *a, **k: sizes.append(x.size) or partition(x, *a, **k))
    top_k_indices(mx.zeros((1, size)), count)
    assert [n < size / 8 for n in sizes] == [True, True]


@pytest.mark.parametrize("rows_per_prompt", [1, 3])
def test_log_softmax_at_indices_has_the_bits_of_log_softmax(rows_per_prompt):
    draw = np.random.default_rng(rows_per_prompt)
    scores = mx.array(draw.normal(size=(6, 97)).astype(np.float32) * 9)
    indices = mx.array(draw.integers(0, 97 * rows_per_prompt, (6 // rows_per_prompt, 5)).astype(np.int32))
    expected = mx.take_along_axis(log_softmax(scores).reshape(6 // rows_per_prompt, -1), indices, axis=1)
    assert mx.array_equal(log_softmax_at(scores, indices, rows_per_prompt), expected)
