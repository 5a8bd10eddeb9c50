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
OUT = np.float32(-1.0e9)


@dataclass(frozen=True)
class Text:
    """A text of a beam: its new tokens, their log-probabilities where asked, its score, and whether an eos or `stop`
    ended it."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: np.float32 = OUT
    complete: bool = False
    ended: bool = False


class Beams:
    """The beams of one prompt and its best finished texts."""

    def __init__(self, settings: Settings, limit: int, stop: Callable[[Sequence[int]], bool] | None = None):
        """limit: the most new tokens. stop: whether new tokens end a text as an eos does."""
        self.settings, self.limit, self.stop = settings, limit, stop
        self.running = [Text(score=np.float32(0)), *[Text()] * (settings.num_beams - 1)]
        self.finished = [Text()] * settings.num_beams
        self.length = 0
        self.hopeful = True
        self.done = False

    @property
    def scores(self) -> list[np.float32]:
        """The scores of the running beams, for the next candidates."""
        return [text.score for text in self.running]

    def step(
        self, parents: Sequence[int], tokens: Sequence[int], scores: np.ndarray, logprobs: Sequence[float] | None
    ) -> list[int]:
        """Takes the candidates of a step, the best first, and returns the parent of each next beam.

        Candidate i adds tokens[i] to the beam parents[i] and has scores[i], float32. `running`, `finished` and `done`
        follow.
        """
        settings, width = self.settings, self.settings.num_beams
        self.length += 1
        ended = np.array(
            [self._ends(self.running[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        )
        ends = ended | (self.length == self.limit)

        def grown(i: int, score: np.float32, complete: bool) -> Text:
            text, more = self.running[parents[i]], () if logprobs is None else (logprobs[i],)
            return Text((*text.tokens, tokens[i]), (*text.logprobs, *more), score, complete, bool(ended[i]))

        # The next beams: the best candidates that do not end.
        alive = scores + ends.astype(np.float32) * OUT
        chosen = _best(alive, width)
        running = [grown(i, alive[i], complete=False) for i in chosen]
        # The finished texts: the best of those before and of the ends among the first `width` candidates.
        full = all(text.complete for text in self.finished) and settings.early_stopping is True
        counts = ends & (np.arange(len(tokens)) < width)
        final = _per_length(scores, self.length, settings.length_penalty)
        for out in (full, not self.hopeful, ~counts):
            final = final + np.asarray(out, np.float32) * OUT
        merged = np.concatenate([[text.score for text in self.finished], final]).astype(np.float32)
        self.finished = [
            self.finished[i] if i < width else grown(i - width, merged[i], complete=bool(counts[i - width]))
            for i in _best(merged, width, [not text.complete for text in self.finished] + (~counts).tolist())
        ]
        self.running = running
        self._judge(bool(ends.all()))
        return [parents[i] for i in chosen]

    def results(self) -> list[Text]:
        """The best texts, the best first, as many as num_return_sequences; of a search cut short also running ones."""
        count = self.settings.num_return_sequences
        complete = [text for text in self.finished if text.complete or self.done]
        return [*complete, *self.running][:count]

    def _ends(self, text: Text, token: int) -> bool:
        return token in self.settings.eos_token_id or (self.stop is not None and self.stop((*text.tokens, token)))

    def _judge(self, all_ended: bool) -> None:
        """Whether the beams can still improve on the finished texts (`_check_early_stop_heuristic`), and whether to go
        on."""
        early, penalty = self.settings.early_stopping, self.settings.length_penalty
        length = self.limit if early == "never" and penalty > 0 else self.length
        best = _per_length(self.running[0].score, length, penalty)
        worst = min(text.score for text in self.finished)
        self.hopeful &= any(best > (worst if text.complete else OUT) for text in self.finished)
        full = all(text.complete for text in self.finished)
        self.done = not self.hopeful or (full and early is True) or all_ended


def _per_length(scores: Any, length: int, penalty: float) -> Any:
    """float32 scores by the length to the power of penalty, and not below the smallest finite value."""
    with np.errstate(over="ignore"):
        return np.maximum(scores / np.float32(length**penalty), np.finfo(np.float32).min)


def _best(scores: np.ndarray, count: int, last: Sequence[bool] = ()) -> list[int]:
    """The places of the count best scores, the best first. Of equal ones those marked in `last` come after the
    others."""
    marks = np.asarray(last) if last else np.zeros(len(scores), bool)
    return np.lexsort((np.arange(len(scores)), marks, -scores))[:count].tolist()
