"""DynamicQuantizeLSTM against onnxruntime.

A state that differs in the last bit can be rounded to the next integer by the next step, a difference of 1 / 255 of its
range: the tolerance allows a few such steps.
"""

from functools import partial

import numpy as np
import pytest
import random_inputs
from onnxruntime_node import assert_matches_onnxruntime

floats = partial(random_inputs.floats, spread=0.5)

TIME, BATCH, IN, HIDDEN = 5, 3, 6, 8


def lstm_inputs(directions, by_channel, dtype, extras):
    rng = np.random.default_rng(1)
    info = np.iinfo(dtype)
    shape = (directions, 4 * HIDDEN) if by_channel else (directions,)
    weights = [rng.integers(info.min, info.max, size=(directions, n, 4 * HIDDEN)).astype(dtype) for n in (IN, HIDDEN)]
    zero = np.full(shape, 0 if dtype == np.int8 else 128, dtype=dtype)
    inputs = [floats(2, TIME, BATCH, IN), *weights]
    if extras:
        inputs += [floats(3, directions, 8 * HIDDEN), np.array([5, 2, 4], dtype=np.int32)]
        inputs += [
            floats(4, directions, BATCH, HIDDEN),
            floats(5, directions, BATCH, HIDDEN),
            floats(6, directions, 3 * HIDDEN),
        ]
    else:
        inputs += [None] * 5
    for seed in (7, 8):
        inputs += [np.random.default_rng(seed).uniform(0.002, 0.006, size=shape).astype(np.float32), zero]
    return inputs


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("extras", [False, True])
def test_dynamic_quantize_lstm(extras, dtype, by_channel, direction):
    case = lstm_inputs(2 if direction == "bidirectional" else 1, by_channel, dtype, extras)
    assert_matches_onnxruntime(
        "DynamicQuantizeLSTM", case, {"direction": direction, "hidden_size": HIDDEN}, ("y", "h", "c"), tolerance=1e-2
    )


def test_one_step_is_exact():
    case = lstm_inputs(1, True, np.int8, True)
    case[0], case[4] = case[0][:1], None
    assert_matches_onnxruntime("DynamicQuantizeLSTM", case, {"hidden_size": HIDDEN}, ("y", "h", "c"), tolerance=2e-6)


@pytest.mark.parametrize("clip", [0.05, 0.3])
def test_the_clip_is_of_the_gates_and_not_of_the_output(clip):
    case = lstm_inputs(1, True, np.int8, True)
    case[0], case[4] = case[0][:1], None
    case[6] = 4 * case[6]  # cell states far beyond the clip
    attrs = {"hidden_size": HIDDEN, "clip": clip}
    assert_matches_onnxruntime("DynamicQuantizeLSTM", case, attrs, ("y", "h", "c"), tolerance=2e-6)
