"""top_p and typical_p without a sort of the vocabulary: the cut against exact sums, and how many numbers are sorted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.generation.logits import cumulative_mass
from mlx_transmuter.generation.logits.cumulative_mass import find_mass_cut
from mlx_transmuter.generation.logits.top_k_top_p import top_k, top_k_top_p, top_p
from mlx_transmuter.generation.logits.typical_sampling import typical_p

VOCAB = 50257


@given(
    rows=st.integers(1, 3),
    size=st.integers(1, 70),
    values=st.sampled_from([2, 5, 1000]),
    limit=st.integers(-1, 1025),
    includes_limit=st.booleans(),
    most_sorted=st.sampled_from([0, 1, 2, 3, 8, 100]),
    seed=st.integers(0, 2**32),
)
def test_the_cut_is_where_the_sum_passes_the_limit(rows, size, values, limit, includes_limit, most_sorted, seed):
    """Equal keys have equal masses, of which some are 0. Masses are multiples of 1/1024, so that sums are exact."""
    draw = np.random.default_rng(seed)
    keys = draw.integers(0, values, (rows, size))
    mass_of_key = draw.integers(0, 3, values) * draw.integers(0, 1 + 1024 // size)
    masses = mass_of_key[keys]
    cut = find_mass_cut(
        mx.array(keys.astype(np.float32)),
        mx.array((masses / 1024).astype(np.float32)),
        limit / 1024,
        includes_limit=includes_limit,
        most_sorted=most_sorted,
    )
    for row in range(rows):
        order = np.argsort(keys[row], kind="stable")
        sums = np.cumsum(masses[row][order])
        rank = int((sums <= limit).sum() if includes_limit else (sums < limit).sum())
        assert int(cut.rank[row, 0]) == rank
        assert float(cut.key[row, 0]) == keys[row][order[min(rank, size - 1)]]


def kept_by_exact_sums(scores: np.ndarray, p: float, min_tokens_to_keep: int) -> tuple[int, int]:
    """Returns the fewest and the most tokens that top_p may keep: sums within rounding of 1 - p count as either."""
    weights = np.exp(np.sort(scores.astype(np.float64)) - scores.max())
    sums = np.cumsum(weights / weights.sum())[: len(scores) - min_tokens_to_keep]
    return len(scores) - int((sums <= 1 - p + 2e-6).sum()), len(scores) - int((sums <= 1 - p - 2e-6).sum())


def vocabulary_of_scores(seed: int) -> np.ndarray:
    """Rows of few likely tokens, of many, and of scores of 8 bits, of which many are equal."""
    scores = np.random.default_rng(seed).standard_normal((3, VOCAB)) * np.array([[6], [1], [3]])
    scores[2] = np.round(scores[2] * 8) / 8
    return scores.astype(np.float32)


@pytest.mark.parametrize("min_tokens_to_keep", [1, 4])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("most_sorted", [1024, VOCAB])
def test_top_p_of_a_vocabulary_keeps_the_best_by_exact_sums(p, min_tokens_to_keep, most_sorted, monkeypatch):
    monkeypatch.setattr(cumulative_mass, "MOST_SORTED_ON_CPU", most_sorted)
    scores = vocabulary_of_scores(7)
    found = np.array(top_p(mx.array(scores), p, min_tokens_to_keep))
    for row, kept in zip(scores, np.isfinite(found), strict=True):
        fewest, most = kept_by_exact_sums(row, p, min_tokens_to_keep)
        assert fewest <= kept.sum() <= most
        # The best ones; of equal scores those with the highest indices.
        best = np.argsort(row, kind="stable")[VOCAB - kept.sum() :]
        assert set(best) == set(np.flatnonzero(kept))


@given(
    size=st.integers(1, 90),
    values=st.sampled_from([1, 2, 5, 1000]),
    k=st.integers(1, 90),
    p=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.97]),
    min_tokens_to_keep=st.integers(1, 3),
    removed=st.sampled_from([0, 0.9]),
    seed=st.integers(0, 2**32),
)
def test_top_k_and_top_p_together_are_one_after_the_other(size, values, k, p, min_tokens_to_keep, removed, seed):
    draw = np.random.default_rng(seed)
    scores = draw.integers(0, values, (2, size)).astype(np.float32) * 0.37
    scores[draw.random(scores.shape) < removed] = -np.inf
    scores[:, draw.integers(size)] = 1.0
    k, min_tokens_to_keep = max(k, min_tokens_to_keep), min(min_tokens_to_keep, size)
    found = np.array(top_k_top_p(mx.array(scores), k, p, min_tokens_to_keep))
    expected = np.array(top_p(top_k(mx.array(scores), k), p, min_tokens_to_keep))
    for row, kept, other in zip(scores, np.isfinite(found), np.isfinite(expected), strict=True):
        if kept.sum() != other.sum():  # the sum that decides is within rounding of the limit
            masses = np.sort(np.exp(row.astype(np.float64))[np.isfinite(np.array(top_k(mx.array(row[None]), k))[0])])
            sums = np.cumsum(masses / masses.sum())
            assert np.abs(sums - (1 - p)).min() < 1e-6
        else:
            np.testing.assert_array_equal(kept, other)


@pytest.mark.parametrize(
    ("process", "most"),
    [
        (lambda scores: top_p(scores, 0.9), 1024),
        (lambda scores: typical_p(scores, 0.9), 1024),
        (lambda scores: top_k_top_p(scores, 50, 0.9), 50),
    ],
    ids=["top_p", "typical_p", "top_k and top_p"],
)
def test_no_vocabulary_is_sorted_on_a_cpu(process, most, monkeypatch):
    sizes = []
    for sort in (mx.sort, mx.argsort):
        monkeypatch.setattr(
            mx, sort.__name__, lambda x, *a, sort=sort, **k: sizes.append(x.shape[-1]) or sort(x, *a, **k)
        )
    process(mx.zeros((2, VOCAB)))
    assert 0 < max(sizes) <= most
