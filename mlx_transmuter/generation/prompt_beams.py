"""PromptBeams: the beams of one prompt and its finished hypotheses, as `_beam_search` of transformers 4.57.6 updates
them.

float32 throughout, in the order of operations of transformers: what it adds to push a candidate out of the running, is
added here. Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_transmuter.generation.beam_stop_rule import EXCLUDED_SCORE, BeamStopRule, length_penalized
from mlx_transmuter.generation.logits.score_faults import ScoreFault
from mlx_transmuter.generation.logits.scores import LOWEST_FINITE
from mlx_transmuter.generation.logits.token_selection import BeamCandidates
from mlx_transmuter.generation.settings import Settings
from mlx_transmuter.generation.stop_rules import StopRules


@dataclass(frozen=True)
class BeamHypothesis:
    """A sequence of a beam search: its new tokens, their log-probabilities where asked for, and its score.

    is_complete: whether it is finished, and not the empty one of a search that has found too few. ended_by_stop:
    whether an eos or the stop condition ended it.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: np.float32 = EXCLUDED_SCORE
    is_complete: bool = False
    ended_by_stop: bool = False


class PromptBeams:
    """The running beams of one prompt, and its best finished hypotheses. fault: why the search failed; None unless it
    did."""

    def __init__(self, settings: Settings, max_new_tokens: int, stop_rules: StopRules):
        self.settings, self.max_new_tokens, self.stop_rules = settings, max_new_tokens, stop_rules
        self.running_beams = [BeamHypothesis(score=np.float32(0)), *[BeamHypothesis()] * (settings.num_beams - 1)]
        self.finished_hypotheses = [BeamHypothesis()] * settings.num_beams
        self.generated_length = 0
        self.fault: ScoreFault | None = None
        self.stop_rule = BeamStopRule(settings, max_new_tokens)

    @property
    def is_done(self) -> bool:
        """Whether the search of the prompt has ended."""
        return self.stop_rule.is_done or self.fault is not None

    def take_candidates(self, candidates: BeamCandidates | ScoreFault) -> list[int]:
        """Takes the candidates of a step, the best first, and returns the parent of each next beam: candidate i adds
        tokens[i] to the beam beams[i] and has scores[i].

        The search fails, and no beam follows, where a score was NaN, or where every token of every beam is removed
        before a hypothesis is complete.
        """
        if isinstance(candidates, ScoreFault):
            self.fault = candidates
            return []
        if candidates.scores.max() <= LOWEST_FINITE and not any(text.is_complete for text in self.finished_hypotheses):
            self.fault = ScoreFault.ALL_REMOVED
            return []
        self.generated_length += 1
        stopped = np.array(
            [
                self.stop_rules.ends_row(self.running_beams[beam].tokens, token)
                for beam, token in zip(candidates.beams, candidates.tokens, strict=True)
            ]
        )
        ended = stopped | (self.generated_length == self.max_new_tokens)
        # The next beams: the best candidates that do not end.
        alive = candidates.scores + ended.astype(np.float32) * EXCLUDED_SCORE
        indices = _best_indices(alive, self.settings.num_beams)
        running = [self._extend(candidates, i, score=alive[i], ended_by_stop=bool(stopped[i])) for i in indices]
        self.finished_hypotheses = self._merge_finished(candidates, stopped, ended)
        self.running_beams = running
        self.stop_rule.update(running[0].score, self.generated_length, self.finished_hypotheses, bool(ended.all()))
        return [candidates.beams[i] for i in indices]

    def best_hypotheses(self) -> list[BeamHypothesis]:
        """Returns the best num_return_sequences hypotheses, the best first; of a search that was cancelled also running
        ones, of one that failed empty ones."""
        if self.fault is not None:
            return [BeamHypothesis()] * self.settings.num_return_sequences
        finished = [hypothesis for hypothesis in self.finished_hypotheses if hypothesis.is_complete or self.is_done]
        return [*finished, *self.running_beams][: self.settings.num_return_sequences]

    def _extend(self, candidates: BeamCandidates, index: int, **outcome: Any) -> BeamHypothesis:
        """Returns the beam of a candidate with its token; outcome: the score and the flags of the new hypothesis."""
        beam = self.running_beams[candidates.beams[index]]
        logprobs = () if candidates.logprobs is None else (candidates.logprobs[index],)
        return BeamHypothesis((*beam.tokens, candidates.tokens[index]), (*beam.logprobs, *logprobs), **outcome)

    def _merge_finished(
        self, candidates: BeamCandidates, stopped: np.ndarray, ended: np.ndarray
    ) -> list[BeamHypothesis]:
        """Returns the best of the finished hypotheses and of the candidates that end among the first num_beams."""
        before, width = self.finished_hypotheses, self.settings.num_beams
        stops_early = self.settings.early_stopping is True and all(hypothesis.is_complete for hypothesis in before)
        completes = ended & (np.arange(len(ended)) < width)
        final = length_penalized(candidates.scores, self.generated_length, self.settings.length_penalty)
        for excluded in (stops_early, not self.stop_rule.can_improve, ~completes):
            final = final + np.asarray(excluded, np.float32) * EXCLUDED_SCORE
        merged = np.concatenate([[hypothesis.score for hypothesis in before], final]).astype(np.float32)
        incomplete = [not hypothesis.is_complete for hypothesis in before] + (~completes).tolist()
        hypotheses = []
        for i in _best_indices(merged, width, incomplete):
            if i < width:
                hypotheses.append(before[i])
                continue
            candidate = i - width
            flags = {"is_complete": bool(completes[candidate]), "ended_by_stop": bool(stopped[candidate])}
            hypotheses.append(self._extend(candidates, candidate, score=merged[i], **flags))
        return hypotheses


def _best_indices(scores: np.ndarray, count: int, placed_last: Sequence[bool] = ()) -> list[int]:
    """Returns the indices of the `count` best scores, the best first. Of equal ones those marked in placed_last come
    after the others."""
    marks = np.asarray(placed_last) if placed_last else np.zeros(len(scores), bool)
    return np.lexsort((np.arange(len(scores)), marks, -scores))[:count].tolist()
