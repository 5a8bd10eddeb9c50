"""top_k and top_p of transformers 4.57.6, over scores float32 [rows, vocab]; a removed token has a score of -inf."""

from __future__ import annotations

import mlx.core as mx

from mlx_transmuter.generation.logits.cumulative_mass import find_mass_cut
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE, probabilities
from mlx_transmuter.generation.logits.top_k_indices import kth_best_score, top_k_indices
from mlx_transmuter.ops.functional.exponential import fast_exp

# The most scores of a row that are sorted for top_k and top_p together.
MOST_SORTED_SCORES = 1024


def top_k(scores: mx.array, k: int) -> mx.array:
    """Removes the scores below the k-th best; all ties of the k-th stay. TopKLogitsWarper."""
    return mx.where(scores < kth_best_score(scores, k), REMOVED_SCORE, scores)


def top_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes, from the least likely up, the tokens whose probabilities add up to at most 1 - p; of equal scores that
    with the lowest index first. TopPLogitsWarper."""
    cut = find_mass_cut(scores, probabilities(scores), 1 - p, includes_limit=True)
    count = mx.minimum(cut.rank, scores.shape[-1] - min_tokens_to_keep)
    return remove_lowest(scores, count, mx.minimum(cut.key, kth_best_score(scores, min_tokens_to_keep)))


def top_k_top_p(scores: mx.array, k: int, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Does top_k and then top_p, for k of at least min_tokens_to_keep. Only the k best scores are sorted."""
    if k > min(MOST_SORTED_SCORES, scores.shape[-1] // 2):
        return top_p(top_k(scores, k), p, min_tokens_to_keep)
    best = mx.sort(mx.take_along_axis(scores, top_k_indices(scores, k), axis=-1), axis=-1)
    kth = best[:, :1]
    num_kept = mx.sum(scores >= kth, axis=-1, keepdims=True).astype(mx.int32)
    ties = num_kept - k  # scores beside the k best that equal the k-th: the first that top_p removes
    weights = fast_exp(best - best[:, -1:])
    total = mx.sum(weights, axis=-1, keepdims=True) + ties * weights[:, :1]
    masses = weights / total
    mass_of_ties, limit = ties * masses[:, :1], 1 - p
    num_removed = mx.sum(mass_of_ties + mx.cumsum(masses, axis=-1) <= limit, axis=-1, keepdims=True).astype(mx.int32)
    place = mx.minimum(num_removed, k - min_tokens_to_keep)
    # Where the ties alone are more than the limit, as many of them go as add up to it.
    removed_ties = mx.where(mass_of_ties <= limit, ties, mx.floor(limit / masses[:, :1])).astype(mx.int32)
    num_below = scores.shape[-1] - num_kept
    return remove_lowest(scores, num_below + removed_ties + place, mx.take_along_axis(best, place, axis=-1))


def remove_lowest(scores: mx.array, count: mx.array, bound: mx.array) -> mx.array:
    """Removes the count[r] lowest scores of each row, of equal ones those with the lowest indices.

    count: int32 [rows, 1]. bound: [rows, 1], a score that no fewer than count[r] scores do not exceed, and fewer are
    below: the highest that goes, or the lowest that stays.
    """
    is_below, is_bound = scores < bound, scores == bound
    removed_at_bound = count - mx.sum(is_below, axis=-1, keepdims=True)
    is_removed = is_below | (is_bound & (mx.cumsum(is_bound.astype(mx.int32), axis=-1) <= removed_at_bound))
    return mx.where(is_removed, REMOVED_SCORE, scores)
