"""typical_p of transformers 4.57.6: the tokens whose surprise is nearest to the entropy (Meister et al. 2022)."""

from __future__ import annotations

import mlx.core as mx

from mlx_transmuter.generation.logits.scores import log_softmax, probabilities
from mlx_transmuter.generation.logits.top_k_top_p import remove_sorted
from mlx_transmuter.ops.functional.exponential import fast_exp


def typical_p(scores: mx.array, p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Removes all but the tokens whose surprise is nearest to the entropy, up to the probability p together, from
    scores float32 [rows, vocab]. TypicalLogitsWarper."""
    logs = log_softmax(scores)
    masses = fast_exp(logs)
    entropy = -mx.sum(mx.where(masses > 0, logs * masses, 0), axis=-1, keepdims=True)
    distance = mx.abs(-logs - entropy)
    order = mx.argsort(distance, axis=-1)
    cumulative = mx.cumsum(probabilities(mx.take_along_axis(scores, order, axis=-1)), axis=-1)
    last = mx.minimum(mx.sum(cumulative < p, axis=-1, keepdims=True), scores.shape[-1] - 1)
    ascending = mx.take_along_axis(distance, order, axis=-1)
    far = ascending > mx.take_along_axis(ascending, last, axis=-1)
    return remove_sorted(scores, order, far & (mx.arange(scores.shape[-1]) >= min_tokens_to_keep))
