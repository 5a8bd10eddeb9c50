"""Scores of tokens, float32 [rows, vocab]: their constants, their softmax and its logarithm."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.exponential import fast_exp, reduce_last_axis, softmax_numerator_and_sum

# The score of a token that a processor removes.
REMOVED_SCORE = -mx.inf
LOWEST_FINITE, HIGHEST_FINITE = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


def probabilities(scores: mx.array) -> mx.array:
    """Returns the softmax over the last axis."""
    weights, sums = softmax_numerator_and_sum(scores)
    return weights if sums is None else weights / sums


def log_softmax(scores: mx.array) -> mx.array:
    """Returns the logarithm of the softmax over the last axis, computed from the distances to the best score, which
    keeps their digits."""
    best, log_sum = _max_and_log_sum(scores)
    return scores - best - log_sum


def log_softmax_at(scores: mx.array, indices: mx.array, rows_per_prompt: int = 1) -> mx.array:
    """Returns log_softmax(scores) at `indices` alone; the rest is not computed.

    scores: [rows, n]. indices: int32 [rows / rows_per_prompt, k], into the rows_per_prompt × n scores of the rows of
    one prompt.
    """
    best, log_sum = _max_and_log_sum(scores)
    if rows_per_prompt == 1:
        return mx.take_along_axis(scores, indices, axis=-1) - best - log_sum
    flat = indices + mx.arange(indices.shape[0], dtype=mx.int32)[:, None] * (rows_per_prompt * scores.shape[-1])
    row = flat // scores.shape[-1]
    return mx.take(scores, flat) - mx.take(best, row) - mx.take(log_sum, row)


def _max_and_log_sum(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the best score, and the logarithm of the sum of the exponentials of the distances to it: [rows, 1]
    each."""
    best = reduce_last_axis(mx.max, scores)
    return best, mx.log(mx.sum(fast_exp(scores - best), axis=-1, keepdims=True))
