"""Masks of scores: what each kind adds in a step of two tokens after two, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_transmuter.converters.passes.attention.score_masks import (
    AddedMask,
    BooleanMask,
    CausalMask,
    PaddingMask,
    ScoreMask,
    WindowMask,
)

INF = np.inf
NUMBERS = np.array([[0, -2, 1, 0], [3, 0, 0, -1]], np.float32)
BOOLEANS = np.array([[True, True, False, False], [False, True, True, True]])
PADDING = np.array([[0, 1, 1, 1]], np.int32)  # of a row [columns]; 0 hides
CASES: dict[str, tuple[ScoreMask, np.ndarray | None, list[list[float]]]] = {
    "causal": (CausalMask(), None, [[0, 0, 0, -INF], [0, 0, 0, 0]]),
    "causal, scaled": (CausalMask().scaled(2), None, [[0, 0, 0, -INF], [0, 0, 0, 0]]),
    "a window": (WindowMask(window=2), None, [[-INF, 0, 0, 0], [-INF, -INF, 0, 0]]),
    "added": (AddedMask("m"), NUMBERS, [[0, -2, 1, 0], [3, 0, 0, -1]]),
    "added, scaled": (AddedMask("m", 0.5).scaled(4), NUMBERS, [[0, -4, 2, 0], [6, 0, 0, -2]]),
    "booleans": (BooleanMask("m", visible=True, hidden_bias=-9.0), BOOLEANS, [[0, 0, -9, -9], [-9, 0, 0, 0]]),
    "booleans that hide": (BooleanMask("m", visible=False), BOOLEANS, [[-INF, -INF, 0, 0], [0, -INF, -INF, -INF]]),
    "booleans, scaled": (BooleanMask("m", True, -9.0).scaled(2), BOOLEANS, [[0, 0, -18, -18], [-18, 0, 0, 0]]),
    "padding": (PaddingMask("m", -5.0), PADDING, [[-5, 0, 0, 0]]),
    "padding, scaled": (PaddingMask("m", -5.0).scaled(3), PADDING, [[-15, 0, 0, 0]]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_mask_adds_what_it_says(case):
    mask, array, expected = CASES[case]
    np.testing.assert_array_equal(mask.bias(array, past=2, seq=2), [expected])


def test_a_mask_with_heads_keeps_them():
    array = np.stack([NUMBERS, 2 * NUMBERS])[None]
    np.testing.assert_array_equal(AddedMask("m").bias(array, past=2, seq=2), array[0])
