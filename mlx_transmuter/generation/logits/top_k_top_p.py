"""top_k and top_p of transformers 4.57.6, over scores float32 [rows, vocab]; a removed token has a score of -inf."""

from __future__ import annotations

import mlx.core as mx

from mlx_transmuter.generation.logits.scores import REMOVED_SCORE, probabilities
from mlx_transmuter.generation.logits.top_k_indices import kth_best_score


def top_k(scores: mx.array, k: int) -> mx.array:
    """Removes the scores below the k-th best; all ties of the k-th stay. TopKLogitsWarper."""
    return mx.where(scores < kth_best_score(scores, k), REMOVED_SCORE, scores)


def top_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes, from the least likely up, the tokens whose probabilities add up to at most 1 - p. TopPLogitsWarper."""
    order = mx.argsort(scores, axis=-1)
    ascending = mx.take_along_axis(scores, order, axis=-1)
    cumulative = mx.cumsum(probabilities(ascending), axis=-1)
    removable = mx.arange(scores.shape[-1]) < scores.shape[-1] - min_tokens_to_keep
    return remove_sorted(scores, order, (cumulative <= 1 - p) & removable)


def remove_sorted(scores: mx.array, order: mx.array, removed: mx.array) -> mx.array:
    """Removes the tokens order[i] for which removed[i] is true; order int32, removed bool, both like scores."""
    marks = mx.put_along_axis(mx.zeros(scores.shape, dtype=mx.bool_), order, removed, axis=-1)
    return mx.where(marks, REMOVED_SCORE, scores)
