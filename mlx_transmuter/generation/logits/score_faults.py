"""Scores of which no token can be selected, and how the selection reports them: in place of the token's id.

A row's best score says all: the maximum of scores is NaN where any is, minus infinity where every token is removed.
Plus infinity is a score like any other to argmax, but has no softmax to sample from.
"""

from __future__ import annotations

from enum import IntEnum

import mlx.core as mx

from mlx_transmuter.ops.functional.exponential import reduce_last_axis


class ScoreFault(IntEnum):
    """What is wrong with the scores of a row; the value stands where the id of its token would."""

    NAN = -1
    ALL_REMOVED = -2
    INFINITE = -3

    @property
    def description(self) -> str:
        """What stands in place of scores, for a message."""
        return _DESCRIPTION_AND_REMEDY[self][0]

    @property
    def remedy(self) -> str:
        """What mends it, for a message."""
        return _DESCRIPTION_AND_REMEDY[self][1]


_DESCRIPTION_AND_REMEDY = {
    ScoreFault.NAN: (
        "scores of NaN",
        "look for NaN in the weights, or numbers too large for float16 (convert with another dtype); "
        "remove_invalid_values takes NaN as 0",
    ),
    ScoreFault.ALL_REMOVED: (
        "no token that is left: the processors remove all of them, or every logit is minus infinity",
        "remove fewer tokens (suppress_tokens, bad_words_ids, no_repeat_ngram_size, the task's processors)",
    ),
    ScoreFault.INFINITE: (
        "an infinite score, of which no probability follows",
        "raise the temperature, or look for infinite biases and logits",
    ),
}


def best_scores(scores: mx.array) -> mx.array:
    """Returns the best of scores [rows, n], [rows, 1]; NaN where any is NaN."""
    return reduce_last_axis(mx.max, scores)


def tokens_or_faults(tokens: mx.array, best: mx.array, *, sampled: bool) -> mx.array:
    """Returns tokens int32 [rows, 1], with the ScoreFault of each row whose best score [rows, 1] allows no selection.

    sampled: whether tokens are drawn from the softmax of the scores.
    """
    checked = mx.where(best == -mx.inf, int(ScoreFault.ALL_REMOVED), tokens)
    if sampled:
        checked = mx.where(best == mx.inf, int(ScoreFault.INFINITE), checked)
    return mx.where(mx.isnan(best), int(ScoreFault.NAN), checked).astype(mx.int32)


def fault_of(token: int) -> ScoreFault | None:
    """Returns what a selected token says of its row's scores; None for an id."""
    return ScoreFault(token) if token < 0 else None
