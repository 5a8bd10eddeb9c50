"""min_p, epsilon_cutoff and eta_cutoff of transformers 4.57.6: each removes the tokens below a probability, from scores
float32 [rows, vocab]."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.logits.scores import LOWEST_FINITE, REMOVED_SCORE, log_softmax, probabilities
from mlx_transmuter.generation.logits.top_k_indices import kth_best_score, top_k_mask


def min_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of less than p times the probability of the best one. MinPLogitsWarper."""
    masses = probabilities(scores)
    low = masses < p * mx.max(masses, axis=-1, keepdims=True)
    return mx.where(low & ~top_k_mask(scores, min_tokens_to_keep), REMOVED_SCORE, scores)


def epsilon_cutoff(scores: mx.array, epsilon: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of a probability below epsilon. EpsilonLogitsWarper."""
    low = probabilities(scores) < epsilon
    return mx.where(low & (scores < kth_best_score(scores, min_tokens_to_keep)), REMOVED_SCORE, scores)


def eta_cutoff(scores: mx.array, epsilon: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes the tokens of a probability below min(epsilon, √epsilon · exp(-entropy)). EtaLogitsWarper."""
    masses = probabilities(scores)
    entropy = -mx.sum(mx.maximum(log_softmax(scores), LOWEST_FINITE) * masses, axis=-1, keepdims=True)
    eta = mx.minimum(epsilon, float(np.sqrt(np.float32(epsilon))) * mx.exp(-entropy))
    return mx.where((masses < eta) & (scores < kth_best_score(scores, min_tokens_to_keep)), REMOVED_SCORE, scores)
