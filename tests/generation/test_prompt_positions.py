"""The positions that a task gives for its prompts, and those of the tokens after them."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_transmuter.generation import GenerationError
from mlx_transmuter.generation.prompt_positions import PromptPositions


def test_positions_continue_from_the_largest_of_the_prompt():
    """As the rope delta of Qwen2-VL: index + largest + 1 - length, on all axes."""
    image = [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    positions = PromptPositions([image, []], [[9] * 6, [9] * 2])
    found = positions.step_positions([4, 0], 4, 1)
    assert found.shape == (3, 2, 4)
    assert found[:, 0].tolist() == [[1, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]
    assert found[:, 1].tolist() == [[0, 1, 2, 3]] * 3


def test_positions_of_one_axis_are_of_two_dimensions():
    found = PromptPositions([[[5, 6, 7]]], [[1, 2, 3]]).step_positions([0, 3], 2, 2)
    assert found.tolist() == [[5, 6], [8, 9]]
    assert found.dtype == np.int32


@pytest.mark.parametrize("wrong", [[], [[[0, 1]], []], [[[0, 1, 2], [0, 1]], []]])
def test_positions_that_do_not_fit_are_an_error(wrong):
    with pytest.raises(GenerationError, match="position_ids"):
        PromptPositions(wrong, [[1, 2, 3], [4]])
