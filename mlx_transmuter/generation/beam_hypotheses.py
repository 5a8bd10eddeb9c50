"""Beam search over one prompt's candidates, as `_beam_search` of transformers 4.57.6 does it after its top-k.

float32 throughout, in the order of operations of transformers: what it adds to push a candidate out of the running, it
adds here. Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_transmuter.generation.settings import Settings

# What transformers adds to, or begins with as, the score of a text that doesn't count.
EXCLUDED_SCORE = np.float32(-1.0e9)


@dataclass(frozen=True)
class BeamHypothesis:
    """A text of a beam: its new tokens, their log-probabilities where asked, its score, and whether an eos or `stop`
    ended it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: np.float32 = EXCLUDED_SCORE
    is_complete: bool = False
    ended_by_stop: bool = False


class BeamHypotheses:
    """The beams of one prompt and its best finished texts."""

    def __init__(self, settings: Settings, limit: int, stop: Callable[[Sequence[int]], bool] | None = None):
        """limit: the most new tokens. stop: whether new tokens end a text as an eos does."""
        self.settings, self.max_new_tokens, self.stop_condition = settings, limit, stop
        self.running_beams = [BeamHypothesis(score=np.float32(0)), *[BeamHypothesis()] * (settings.num_beams - 1)]
        self.finished_hypotheses = [BeamHypothesis()] * settings.num_beams
        self.generated_length = 0
        self.can_improve = True
        self.is_done = False

    @property
    def running_scores(self) -> list[np.float32]:
        """The scores of the running beams, for the next candidates."""
        return [text.score for text in self.running_beams]

    def take_candidates(
        self, parents: Sequence[int], tokens: Sequence[int], scores: np.ndarray, logprobs: Sequence[float] | None
    ) -> list[int]:
        """Takes the candidates of a step, the best first, and returns the parent of each next beam.

        Candidate i adds tokens[i] to the beam parents[i] and has scores[i], float32. `running`, `finished` and `done`
        follow.
        """
        settings, width = self.settings, self.settings.num_beams
        self.generated_length += 1
        ended = np.array(
            [
                self._ends_hypothesis(self.running_beams[parent], token)
                for parent, token in zip(parents, tokens, strict=True)
            ]
        )
        ends = ended | (self.generated_length == self.max_new_tokens)

        def grown(i: int, score: np.float32, complete: bool) -> BeamHypothesis:
            text, more = self.running_beams[parents[i]], () if logprobs is None else (logprobs[i],)
            return BeamHypothesis((*text.tokens, tokens[i]), (*text.logprobs, *more), score, complete, bool(ended[i]))

        # The next beams: the best candidates that do not end.
        alive = scores + ends.astype(np.float32) * EXCLUDED_SCORE
        chosen = _best_indices(alive, width)
        running = [grown(i, alive[i], complete=False) for i in chosen]
        # The finished texts: the best of those before and of the ends among the first `width` candidates.
        full = all(text.is_complete for text in self.finished_hypotheses) and settings.early_stopping is True
        counts = ends & (np.arange(len(tokens)) < width)
        final = _length_penalized(scores, self.generated_length, settings.length_penalty)
        for out in (full, not self.can_improve, ~counts):
            final = final + np.asarray(out, np.float32) * EXCLUDED_SCORE
        merged = np.concatenate([[text.score for text in self.finished_hypotheses], final]).astype(np.float32)
        self.finished_hypotheses = [
            self.finished_hypotheses[i] if i < width else grown(i - width, merged[i], complete=bool(counts[i - width]))
            for i in _best_indices(
                merged, width, [not text.is_complete for text in self.finished_hypotheses] + (~counts).tolist()
            )
        ]
        self.running_beams = running
        self._apply_stop_rule(bool(ends.all()))
        return [parents[i] for i in chosen]

    def best_hypotheses(self) -> list[BeamHypothesis]:
        """The best texts, the best first, as many as num_return_sequences; of a search cut short also running ones."""
        count = self.settings.num_return_sequences
        complete = [text for text in self.finished_hypotheses if text.is_complete or self.is_done]
        return [*complete, *self.running_beams][:count]

    def _ends_hypothesis(self, text: BeamHypothesis, token: int) -> bool:
        return token in self.settings.eos_token_id or (
            self.stop_condition is not None and self.stop_condition((*text.tokens, token))
        )

    def _apply_stop_rule(self, all_ended: bool) -> None:
        """Whether the beams can still improve on the finished texts (`_check_early_stop_heuristic`), and whether to go
        on."""
        early, penalty = self.settings.early_stopping, self.settings.length_penalty
        length = self.max_new_tokens if early == "never" and penalty > 0 else self.generated_length
        best = _length_penalized(self.running_beams[0].score, length, penalty)
        worst = min(text.score for text in self.finished_hypotheses)
        self.can_improve &= any(
            best > (worst if text.is_complete else EXCLUDED_SCORE) for text in self.finished_hypotheses
        )
        full = all(text.is_complete for text in self.finished_hypotheses)
        self.is_done = not self.can_improve or (full and early is True) or all_ended


def _length_penalized(scores: Any, length: int, penalty: float) -> Any:
    """float32 scores by the length to the power of penalty, and not below the smallest finite value."""
    with np.errstate(over="ignore"):
        return np.maximum(scores / np.float32(length**penalty), np.finfo(np.float32).min)


def _best_indices(scores: np.ndarray, count: int, placed_last: Sequence[bool] = ()) -> list[int]:
    """The places of the count best scores, the best first. Of equal ones those marked in `last` come after the
    others."""
    marks = np.asarray(placed_last) if placed_last else np.zeros(len(scores), bool)
    return np.lexsort((np.arange(len(scores)), marks, -scores))[:count].tolist()
