"""The rows of a batch on the host: their prompts in parts, their positions, their tokens and why they end."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.guesses import Guesses

# The most tokens of a lane of several prompts.
PACKED = 512

# Why a text ends. "cancelled" is for a run that its caller gave up.
STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


class Token(NamedTuple):
    """A new token, and its log-probability where asked for."""

    id: int
    logprob: float | None = None


@dataclass
class Result:
    """A text: its tokens without the eos, why it ended, its score under beam search, and what guesses brought."""

    tokens: list[Token]
    finish_reason: str
    score: float | None = None
    guesses: Guesses | None = None


@dataclass
class Row:
    """A row that gets a token after the other. `limit`: its most new tokens. `text`: the prompt and the new tokens."""

    prompt: list[int]
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    guesses: Guesses | None = None

    def __post_init__(self) -> None:
        self.text = list(self.prompt)

    @property
    def live(self) -> bool:
        """Whether the row goes on."""
        return self.finish_reason is None

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        return self.limit - len(self.tokens)

    def accept(
        self, token: int, logprob: float | None, eos: Sequence[int], stop: Callable[[list[int]], bool] | None
    ) -> bool:
        """Takes the token of a step. False when it is an eos, which is no token of the text."""
        if token in eos:
            self.finish_reason = STOP
            return False
        self.tokens.append(token)
        self.text.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if stop is not None and stop(self.tokens):
            self.finish_reason = STOP
        elif not self.room:
            self.finish_reason = LENGTH
        return True

    def result(self) -> Result:
        """The text as it is; one that has not ended was cancelled."""
        return Result(listed(self.tokens, self.logprobs), self.finish_reason or CANCELLED, guesses=self.guesses)


def listed(tokens: Sequence[int], logprobs: Sequence[float]) -> list[Token]:
    """Tokens with their log-probabilities, where there are any."""
    return [Token(token, logprob) for token, logprob in zip(tokens, logprobs or [None] * len(tokens), strict=True)]


def prompt_parts(length: int, most: int | None = None, how: str = "parts") -> list[int]:
    """The steps of a prompt of length tokens: powers of two, the largest first, none above most (45: 32, 8, 4, 1).

    how: what the decoder takes (see its Plan): "parts", a "whole" prompt, or "single" tokens.
    """
    if how != "parts":
        return [length] if how == "whole" else [1] * length
    parts: list[int] = []
    while length:
        part = 1 << (min(length, most or length).bit_length() - 1)
        parts.append(part)
        length -= part
    return parts


def packs(lengths: Mapping[int, int], rows: int, most: int | None = None) -> list[tuple[list[int], int]]:
    """(rows, size) of each lane of size tokens that runs these rows' prompts; [] where that wins too little.

    lengths: row → its prompt's. Steps of all rows take rows × the longest; the lanes must save more than a quarter of
    it, for each size is a shape to compile. There are eight sizes an octave. Prompts stay whole, in lanes of at most
    PACKED tokens, or `most`: every token is weighed against every other of its lane.
    """
    limit, lanes = min(PACKED, most or PACKED), []
    longest = max(lengths.values())
    if longest > limit:
        return []
    for row, length in lengths.items():
        if not lanes or lanes[-1][1] + length > limit:
            lanes.append(([], 0))
        members, total = lanes[-1]
        lanes[-1] = [*members, row], total + length
    sized = [(members, min(limit, _lane(total))) for members, total in lanes]
    taken = sum(size for _, size in sized)
    return sized if 4 * taken < 3 * rows * longest else []


def _lane(length: int) -> int:
    step = max(1, (1 << (length - 1).bit_length()) // 16)
    return -(-length // step) * step


def integers(name: str, values: Iterable[Any]) -> list[int]:
    """The values as ints. Raises GenerationError for any that is no whole number."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise GenerationError(name, repr(values)[:80], "whole numbers") from None


class Positions:
    """The positions that a task gives for its prompts, and those of the tokens after them.

    A prompt's positions are one list per axis, one int per token; [] gives the default. The token at index i after the
    prompt has the position i + delta on all axes, where delta is the largest position of the prompt, plus 1, minus its
    length.
    """

    def __init__(self, given: Sequence[Sequence[Sequence[int]]], prompts: Sequence[list[int]], most: int | None = None):
        """Raises GenerationError where given does not fit prompts, or two prompts have different axes.

        most: positions are below it, where the model has so many.
        """
        self.axes = max(1, *(len(axes) for axes in given)) if given else 1
        self.rows: list[np.ndarray] = []
        if len(given) != len(prompts):
            raise GenerationError(
                "input position_ids", f"{len(given)} lists", f"one for each of {len(prompts)} prompts"
            )
        for place, (axes, prompt) in enumerate(zip(given, prompts, strict=True)):
            if not axes:
                axes = [range(len(prompt))] * self.axes
            if len(axes) != self.axes or any(len(axis) != len(prompt) for axis in axes):
                raise GenerationError(
                    f"input position_ids of prompt {place}",
                    f"axes of {', '.join(str(len(axis)) for axis in axes)} positions",
                    f"{self.axes} of {len(prompt)}, one position per token",
                )
            name, limit = f"input position_ids of prompt {place}", min(most or 2**31, 2**31) - 1
            places = [integers(name, axis) for axis in axes]
            if wrong := [position for axis in places for position in axis if not 0 <= position <= limit]:
                raise GenerationError(name, f"the positions {wrong[:5]}", f"positions from 0 to {limit}")
            self.rows.append(np.array(places, np.int32).reshape(self.axes, len(prompt)))

    def at(self, starts: Sequence[int], length: int, width: int) -> np.ndarray:
        """int32 [rows, length], or [axes, rows, length] for several axes: row r, of prompt r // width, from its index
        starts[r]."""
        found = np.zeros((self.axes, len(starts), length), np.int32)
        for row, start in enumerate(starts):
            prompt = self.rows[row // width]
            size = prompt.shape[1]
            after = np.arange(start, start + length, dtype=np.int32) + (prompt.max(initial=-1) + 1 - size)
            found[:, row] = after
            known = prompt[:, start : start + length]
            found[:, row, : known.shape[1]] = known
        return found[0] if self.axes == 1 else found
