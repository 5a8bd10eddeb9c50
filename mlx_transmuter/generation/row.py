"""The rows of a batch on the host: their prompts in parts, their positions, their tokens and why they end."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mlx_transmuter.generation.drafts.draft_tree import DraftCounts
from mlx_transmuter.generation.errors import GenerationError

# Why a text ends. "cancelled" is for a run that its caller gave up.
FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED = "stop", "length", "cancelled"


class Token(NamedTuple):
    """A new token, and its log-probability where asked for."""

    id: int
    logprob: float | None = None


@dataclass
class GenerationResult:
    """A text: its tokens without the eos, why it ended, its score under beam search, and what guesses brought."""

    tokens: list[Token]
    finish_reason: str
    score: float | None = None
    draft_counts: DraftCounts | None = None


@dataclass
class Row:
    """A row that gets a token after the other. `limit`: its most new tokens. `text`: the prompt and the new tokens."""

    prompt: list[int]
    new_token_limit: int
    new_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    draft_counts: DraftCounts | None = None

    def __post_init__(self) -> None:
        self.sequence = list(self.prompt)

    @property
    def is_live(self) -> bool:
        """Whether the row goes on."""
        return self.finish_reason is None

    @property
    def remaining_tokens(self) -> int:
        """How many more tokens it may get."""
        return self.new_token_limit - len(self.new_tokens)

    def append_token(
        self, token: int, logprob: float | None, eos: Sequence[int], stop_condition: Callable[[list[int]], bool] | None
    ) -> bool:
        """Takes the token of a step. False when it is an eos, which is no token of the text."""
        if token in eos:
            self.finish_reason = FINISH_STOP
            return False
        self.new_tokens.append(token)
        self.sequence.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if stop_condition is not None and stop_condition(self.new_tokens):
            self.finish_reason = FINISH_STOP
        elif not self.remaining_tokens:
            self.finish_reason = FINISH_LENGTH
        return True

    def to_result(self) -> GenerationResult:
        """The text as it is; one that has not ended was cancelled."""
        return GenerationResult(
            tokens_with_logprobs(self.new_tokens, self.logprobs),
            self.finish_reason or FINISH_CANCELLED,
            draft_counts=self.draft_counts,
        )


def tokens_with_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> list[Token]:
    """Tokens with their log-probabilities, where there are any."""
    return [Token(token, logprob) for token, logprob in zip(tokens, logprobs or [None] * len(tokens), strict=True)]


def to_integers(name: str, values: Iterable[Any]) -> list[int]:
    """The values as ints. Raises GenerationError for any that is no whole number."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise GenerationError(name, repr(values)[:80], "whole numbers") from None


class PromptPositions:
    """The positions that a task gives for its prompts, and those of the tokens after them.

    A prompt's positions are one list per axis, one int per token; [] gives the default. The token at index i after the
    prompt has the position i + delta on all axes, where delta is the largest position of the prompt, plus 1, minus its
    length.
    """

    def __init__(
        self,
        positions: Sequence[Sequence[Sequence[int]]],
        prompts: Sequence[list[int]],
        max_positions: int | None = None,
    ):
        """Raises GenerationError where given does not fit prompts, or two prompts have different axes.

        most: positions are below it, where the model has so many.
        """
        self.axes = max(1, *(len(axes) for axes in positions)) if positions else 1
        self.per_prompt: list[np.ndarray] = []
        if len(positions) != len(prompts):
            raise GenerationError(
                "input position_ids", f"{len(positions)} lists", f"one for each of {len(prompts)} prompts"
            )
        for place, (axes, prompt) in enumerate(zip(positions, prompts, strict=True)):
            if not axes:
                axes = [range(len(prompt))] * self.axes
            if len(axes) != self.axes or any(len(axis) != len(prompt) for axis in axes):
                raise GenerationError(
                    f"input position_ids of prompt {place}",
                    f"axes of {', '.join(str(len(axis)) for axis in axes)} positions",
                    f"{self.axes} of {len(prompt)}, one position per token",
                )
            name, limit = f"input position_ids of prompt {place}", min(max_positions or 2**31, 2**31) - 1
            places = [to_integers(name, axis) for axis in axes]
            if wrong := [position for axis in places for position in axis if not 0 <= position <= limit]:
                raise GenerationError(name, f"the positions {wrong[:5]}", f"positions from 0 to {limit}")
            self.per_prompt.append(np.array(places, np.int32).reshape(self.axes, len(prompt)))

    def step_positions(self, starts: Sequence[int], length: int, rows_per_prompt: int) -> np.ndarray:
        """int32 [rows, length], or [axes, rows, length] for several axes: row r, of prompt r // width, from its index
        starts[r]."""
        found = np.zeros((self.axes, len(starts), length), np.int32)
        for row, start in enumerate(starts):
            prompt = self.per_prompt[row // rows_per_prompt]
            size = prompt.shape[1]
            after = np.arange(start, start + length, dtype=np.int32) + (prompt.max(initial=-1) + 1 - size)
            found[:, row] = after
            known = prompt[:, start : start + length]
            found[:, row, : known.shape[1]] = known
        return found[0] if self.axes == 1 else found
