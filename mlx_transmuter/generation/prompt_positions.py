"""The positions that a task gives for its prompts, those of the tokens after them, and the limit of a model's
positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_transmuter.generation.errors import GenerationError
from mlx_transmuter.generation.setting_checks import to_integers

INPUT_NAME = "input position_ids"
# More tokens than any row has; twice as many are no number of int32.
MAX_ROW_TOKENS = 2**30


class PromptPositions:
    """The positions of each prompt of a batch, and of the tokens after it.

    A prompt's positions are one list per axis, one int per token; [] gives the default, 0, 1, 2, …. The token at index
    i after the prompt has the position i + delta on all axes, where delta is the largest position of the prompt, plus
    1, minus its length.
    """

    def __init__(
        self,
        positions: Sequence[Sequence[Sequence[int]]],
        prompts: Sequence[list[int]],
        max_positions: int | None = None,
    ):
        """max_positions: all positions must be below it. Raises GenerationError for positions that do not fit their
        prompt or the model, or prompts of different axes."""
        if len(positions) != len(prompts):
            raise GenerationError(INPUT_NAME, f"{len(positions)} lists", f"one for each of {len(prompts)} prompts")
        self.axes = max([1, *(len(axes) for axes in positions)])
        limit = min(max_positions or 2**31, 2**31) - 1
        self.per_prompt = [
            self._check_prompt(f"{INPUT_NAME} of prompt {index}", axes, len(prompt), limit)
            for index, (axes, prompt) in enumerate(zip(positions, prompts, strict=True))
        ]

    def _check_prompt(self, name: str, axes: Sequence[Sequence[int]], length: int, limit: int) -> np.ndarray:
        """Returns the positions of a prompt of `length` tokens, int32 [axes, length]."""
        axes = axes or [range(length)] * self.axes
        if len(axes) != self.axes or any(len(axis) != length for axis in axes):
            sizes = ", ".join(str(len(axis)) for axis in axes)
            expected = f"{self.axes} of {length}, one position per token"
            raise GenerationError(name, f"axes of {sizes} positions", expected)
        checked = [to_integers(name, axis) for axis in axes]
        outside = [position for axis in checked for position in axis if not 0 <= position <= limit]
        if outside:
            raise GenerationError(name, f"the positions {outside[:5]}", f"positions from 0 to {limit}")
        return np.array(checked, np.int32).reshape(self.axes, length)

    def delta(self, prompt: int) -> int:
        """Returns what the tokens after a prompt, by its number, have as positions beyond their indices."""
        positions = self.per_prompt[prompt]
        return int(positions.max(initial=-1)) + 1 - positions.shape[1]

    def step_positions(self, starts: Sequence[int], length: int, rows_per_prompt: int) -> np.ndarray:
        """Returns int32 [rows, length], or [axes, rows, length] for several axes: the positions of `length` tokens of
        each row r, which continues prompt r // rows_per_prompt, from its index starts[r]."""
        positions = np.zeros((self.axes, len(starts), length), np.int32)
        for row, start in enumerate(starts):
            index = row // rows_per_prompt
            positions[:, row] = np.arange(start, start + length, dtype=np.int32) + self.delta(index)
            of_prompt = self.per_prompt[index][:, start : start + length]
            positions[:, row, : of_prompt.shape[1]] = of_prompt
        return positions[0] if self.axes == 1 else positions


def clip_to_positions(tokens: int, max_positions: int | None) -> int:
    """Returns how many of so many tokens of a row have a position; None is no limit but that of int32 numbers."""
    return min(tokens, max_positions or MAX_ROW_TOKENS)
