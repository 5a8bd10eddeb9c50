"""typical_p of transformers 4.57.6: the tokens whose surprise is nearest to the entropy (Meister et al. 2022)."""

from __future__ import annotations

import mlx.core as mx

from mlx_transmuter.generation.logits.cumulative_mass import find_mass_cut
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE, log_softmax, probabilities
from mlx_transmuter.generation.logits.top_k_indices import top_k_mask
from mlx_transmuter.ops.functional.exponential import fast_exp


def typical_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes all but the tokens whose surprise is nearest to the entropy, up to the probability p together, from
    scores float32 [rows, vocab]. TypicalLogitsWarper."""
    logs = log_softmax(scores)
    masses = fast_exp(logs)
    entropy = -mx.sum(mx.where(masses > 0, logs * masses, 0), axis=-1, keepdims=True)
    distance = mx.abs(-logs - entropy)
    is_far = distance > find_mass_cut(distance, probabilities(scores), p, includes_limit=False).key
    if min_tokens_to_keep > 1:  # the nearest is never far
        is_far = is_far & ~top_k_mask(-distance, min_tokens_to_keep)
    return mx.where(is_far, REMOVED_SCORE, scores)
