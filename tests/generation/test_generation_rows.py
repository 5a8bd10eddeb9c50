"""Prompt parts, positions and rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.generation import GenerationError
from mlx_transmuter.generation.row import PromptPositions
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks


def test_a_prompt_of_45_runs_as_32_8_4_and_1():
    assert prefill_chunks(45) == [32, 8, 4, 1]
    assert prefill_chunks(45, 16) == [16, 16, 8, 4, 1]
    assert prefill_chunks(45, 20) == [16, 16, 8, 4, 1]
    assert prefill_chunks(3, 1) == [1, 1, 1]
    assert prefill_chunks(0) == []


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 600)))
def test_parts_are_powers_of_two_that_fall_and_add_up(length, most):
    parts = prefill_chunks(length, most)
    assert sum(parts) == length
    assert all(part & (part - 1) == 0 and part <= (most or length) for part in parts)
    assert parts == sorted(parts, reverse=True)


def test_positions_go_on_from_the_largest_of_the_prompt():
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
