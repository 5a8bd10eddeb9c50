"""CausalConvWithState and VarlenCausalConvWithState against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

B, C = 2, 3
OUTPUTS = ("y", "state")


@pytest.mark.parametrize("seq", [1, 2, 9])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("past", [False, True])
def test_causal_conv_with_state(past, activation, dilation, seq):
    length = 3 * dilation
    inputs = [floats(1, B, C, seq), floats(2, C, 1, 4), floats(3, C), floats(4, B, C, length) if past else None]
    attrs = {"activation": activation, "dilation": dilation}
    assert_matches_onnxruntime("CausalConvWithState", inputs, attrs, OUTPUTS, tolerance=1e-6)
    last = [floats(1, B, seq, C, 2), floats(2, 2 * C, 1, 4), None, floats(4, B, length, C, 2) if past else None]
    assert_matches_onnxruntime("CausalConvWithState", last, {**attrs, "channels_last": 1}, OUTPUTS, tolerance=1e-6)


def test_float16():
    inputs = [floats(i, *shape, dtype=np.float16) for i, shape in enumerate([(B, C, 5), (C, 1, 4), (C,), (B, C, 3)])]
    assert_matches_onnxruntime("CausalConvWithState", inputs, {"activation": "silu"}, OUTPUTS, tolerance=3e-3)


@pytest.mark.parametrize("seq", [1, 2, 5])
def test_states_of_the_last_tokens(seq):
    """onnxruntime's CPU provider has no state_window: expected are its states after the tokens up to each."""
    x, weight, slots = floats(1, B, C, seq), floats(2, C, 1, 4), floats(3, 3, B, C, 3)
    y, states = module_outputs("CausalConvWithState", [x, weight, None, slots], {"state_window": 3}, OUTPUTS)
    for slot in range(3):
        length = seq - 3 + slot + 1
        if length < 1:
            assert not states[slot].any()
            continue
        expected = onnxruntime_outputs("CausalConvWithState", [x[..., :length], weight, None, slots[-1]], {}, OUTPUTS)
        assert_outputs_close(expected[0], y[..., :length], 1e-6)
        assert_outputs_close(expected[1], states[slot], 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_varlen_causal_conv_with_state(bias):
    bounds = np.array([0, 2, 3, 9], dtype=np.int32)
    inputs = [floats(1, 9, C), floats(2, C, 1, 4), bounds, floats(3, C) if bias else None, floats(4, 3, C, 3)]
    assert_matches_onnxruntime("VarlenCausalConvWithState", inputs, {"activation": "silu"}, OUTPUTS, tolerance=1e-6)
