"""When the beam search of a prompt ends: `_check_early_stop_heuristic` and `_beam_search_has_unfinished_sequences` of
transformers 4.57.6, in float32 and in their order of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_transmuter.generation.settings import Settings

if TYPE_CHECKING:
    from mlx_transmuter.generation.prompt_beams import BeamHypothesis

# What transformers adds to the score of a candidate that does not count, and the score of an empty hypothesis.
EXCLUDED_SCORE = np.float32(-1.0e9)


@dataclass
class BeamStopRule:
    """The stop rule of one prompt's search.

    can_improve: whether the best beam may still become better than the worst finished hypothesis. is_done: whether the
    search has ended.
    """

    settings: Settings
    max_new_tokens: int
    can_improve: bool = True
    is_done: bool = False

    def update(
        self, best_score: np.float32, generated_length: int, finished: Sequence[BeamHypothesis], all_ended: bool
    ) -> None:
        """Applies the rule after a step.

        best_score: of the running beams. finished: the finished hypotheses, of which empty ones are not complete.
        all_ended: whether every candidate of the step has ended.
        """
        early, penalty = self.settings.early_stopping, self.settings.length_penalty
        length = self.max_new_tokens if early == "never" and penalty > 0 else generated_length
        best = length_penalized(best_score, length, penalty)
        worst = min(hypothesis.score for hypothesis in finished)
        self.can_improve &= any(best > (worst if hypothesis.is_complete else EXCLUDED_SCORE) for hypothesis in finished)
        stops_early = early is True and all(hypothesis.is_complete for hypothesis in finished)
        self.is_done = not self.can_improve or stops_early or all_ended


def length_penalized(scores: Any, length: int, penalty: float) -> Any:
    """Returns float32 scores divided by length ** penalty, and not below the smallest finite value.

    A power beyond float32 is infinite, or zero.
    """
    with np.errstate(all="ignore"):
        return np.maximum(scores / np.float32(np.float64(length) ** penalty), np.finfo(np.float32).min)
