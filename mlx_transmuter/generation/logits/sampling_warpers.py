"""The sampling settings of transformers 4.57.6 (its logits warpers), as functions of scores float32 [rows, vocab].

Each works on a fresh softmax of the scores that the one before it left. `keep` is min_tokens_to_keep.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.logits.top_k_indices import top_k_indices
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.ops.functional.exponential import fast_exp, softmax_numerator_and_sum

Warper = Callable[[mx.array], mx.array]

REMOVED_SCORE = -mx.inf
LOWEST_FINITE = float(np.finfo(np.float32).min)


def build_warpers(settings: Settings) -> list[tuple[str, Warper]]:
    """(setting, function) for each sampling setting that is on, in the order of `_get_logits_processor`."""
    keep = settings.min_tokens_to_keep
    steps: list[tuple[str, bool, Warper]] = [
        ("temperature", settings.temperature != 1.0, lambda scores: scores / settings.temperature),
        ("top_k", settings.top_k > 0, lambda scores: top_k(scores, max(settings.top_k, keep))),
        ("top_p", settings.top_p < 1.0, lambda scores: top_p(scores, settings.top_p, keep)),
        ("min_p", settings.min_p is not None, lambda scores: min_p(scores, settings.min_p or 0.0, keep)),
        ("typical_p", settings.typical_p < 1.0, lambda scores: typical_p(scores, settings.typical_p, keep)),
        (
            "epsilon_cutoff",
            settings.epsilon_cutoff > 0,
            lambda scores: epsilon_cutoff(scores, settings.epsilon_cutoff, keep),
        ),
        ("eta_cutoff", settings.eta_cutoff > 0, lambda scores: eta_cutoff(scores, settings.eta_cutoff, keep)),
    ]
    return [(name, warper) for name, on, warper in steps if on]


def top_k(scores: mx.array, k: int) -> mx.array:
    """Keeps the scores that are not below the k-th best, so all its ties. TopKLogitsWarper."""
    return mx.where(scores < _kth_best_score(scores, k), REMOVED_SCORE, scores)


def top_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes, from the worst up, the tokens whose masses add up to at most 1 - p. TopPLogitsWarper."""
    order = mx.argsort(scores, axis=-1)
    ascending = mx.take_along_axis(scores, order, axis=-1)
    mass = mx.cumsum(_probabilities(ascending), axis=-1)
    return _remove_sorted(
        scores, order, (mass <= 1 - p) & (mx.arange(scores.shape[-1]) < scores.shape[-1] - min_tokens_to_keep)
    )


def min_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of less than p times the mass of the best. MinPLogitsWarper."""
    masses = _probabilities(scores)
    low = masses < p * mx.max(masses, axis=-1, keepdims=True)
    return mx.where(low & ~_best_mask(scores, min_tokens_to_keep), REMOVED_SCORE, scores)


def typical_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Keeps the tokens whose surprise is nearest to the entropy, up to the mass p. TypicalLogitsWarper."""
    logs = log_softmax(scores)
    masses = fast_exp(logs)
    entropy = -mx.sum(mx.where(masses > 0, logs * masses, 0), axis=-1, keepdims=True)
    distance = mx.abs(-logs - entropy)
    order = mx.argsort(distance, axis=-1)
    mass = mx.cumsum(_probabilities(mx.take_along_axis(scores, order, axis=-1)), axis=-1)
    last = mx.minimum(mx.sum(mass < p, axis=-1, keepdims=True), scores.shape[-1] - 1)
    ascending = mx.take_along_axis(distance, order, axis=-1)
    far = ascending > mx.take_along_axis(ascending, last, axis=-1)
    return _remove_sorted(scores, order, far & (mx.arange(scores.shape[-1]) >= min_tokens_to_keep))


def epsilon_cutoff(scores: mx.array, epsilon: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of a mass below epsilon. EpsilonLogitsWarper."""
    low = _probabilities(scores) < epsilon
    return mx.where(low & (scores < _kth_best_score(scores, min_tokens_to_keep)), REMOVED_SCORE, scores)


def eta_cutoff(scores: mx.array, epsilon: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of a mass below min(epsilon, √epsilon · exp(-entropy)). EtaLogitsWarper."""
    masses = _probabilities(scores)
    entropy = -mx.sum(mx.maximum(log_softmax(scores), LOWEST_FINITE) * masses, axis=-1, keepdims=True)
    eta = mx.minimum(epsilon, float(np.sqrt(np.float32(epsilon))) * mx.exp(-entropy))
    return mx.where((masses < eta) & (scores < _kth_best_score(scores, min_tokens_to_keep)), REMOVED_SCORE, scores)


def log_softmax(scores: mx.array) -> mx.array:
    """The logarithms of the softmax over the last axis, from the distances to the best score, which keeps their
    digits."""
    best, log_sum = _max_and_log_sum(scores)
    return scores - best - log_sum


def log_softmax_at(scores: mx.array, indices: mx.array, rows_per_prompt: int = 1) -> mx.array:
    """log_softmax(scores) of scores [rows, n] at places int32 [rows / width, k]: width rows follow each other in one of
    places. What isn't asked for is not computed."""
    flat = indices + mx.arange(indices.shape[0], dtype=mx.int32)[:, None] * (rows_per_prompt * scores.shape[-1])
    row = flat // scores.shape[-1]
    best, log_sum = _max_and_log_sum(scores)
    return mx.take(scores, flat) - mx.take(best, row) - mx.take(log_sum, row)


def _probabilities(scores: mx.array) -> mx.array:
    """The softmax over the last axis."""
    weights, sums = softmax_numerator_and_sum(scores)
    return weights if sums is None else weights / sums


def _max_and_log_sum(scores: mx.array) -> tuple[mx.array, mx.array]:
    """[rows, 1] each: the best score, and the logarithm of the sum of the exponentials of the distances to it."""
    best = mx.max(scores, axis=-1, keepdims=True)
    return best, mx.log(mx.sum(fast_exp(scores - best), axis=-1, keepdims=True))


def _kth_best_score(scores: mx.array, k: int) -> mx.array:
    """[rows, 1]: the k-th best score."""
    places = top_k_indices(scores, min(k, scores.shape[-1]))
    return mx.min(mx.take_along_axis(scores, places, axis=-1), axis=-1, keepdims=True)


def _best_mask(scores: mx.array, count: int) -> mx.array:
    """bool like scores: exactly count tokens of the best scores."""
    places = top_k_indices(scores, min(count, scores.shape[-1]))
    return mx.put_along_axis(mx.zeros(scores.shape, dtype=mx.bool_), places, mx.array(True), axis=-1)


def _remove_sorted(scores: mx.array, order: mx.array, removed: mx.array) -> mx.array:
    """scores without the tokens that removed marks, in the order of order."""
    marks = mx.put_along_axis(mx.zeros(scores.shape, dtype=mx.bool_), order, removed, axis=-1)
    return mx.where(marks, REMOVED_SCORE, scores)
