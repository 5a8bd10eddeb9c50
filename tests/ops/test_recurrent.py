"""Recurrent layers against onnxruntime: directions, lengths, peepholes, activations, clips, layouts."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime

rng = np.random.default_rng(0)
TIME, BATCH, IN, HIDDEN = 4, 3, 2, 5
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
OUTPUT_NAMES = {"RNN": ("y", "h"), "GRU": ("y", "h"), "LSTM": ("y", "h", "c")}


def floats(*shape):
    return (0.5 * rng.normal(size=shape)).astype(np.float32)


def recurrent_inputs(kind, direction, *, bias=True, lengths=False, initial=True, peephole=False):
    n, gates = 2 if direction == "bidirectional" else 1, GATES[kind]
    state = floats(n, BATCH, HIDDEN)
    inputs = [
        floats(TIME, BATCH, IN),
        floats(n, gates * HIDDEN, IN),
        floats(n, gates * HIDDEN, HIDDEN),
        floats(n, 2 * gates * HIDDEN) if bias else None,
        np.array([4, 1, 3], np.int32) if lengths else None,
        state if initial else None,
    ]
    if kind == "LSTM":
        inputs += [floats(n, BATCH, HIDDEN) if initial else None, floats(n, 3 * HIDDEN) if peephole else None]
    while inputs[-1] is None:
        inputs.pop()
    return inputs


def check_onnx_node(kind, inputs, **attrs):
    assert_matches_onnxruntime(kind, inputs, {"hidden_size": HIDDEN, **attrs}, OUTPUT_NAMES[kind], domain="ai.onnx")


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_directions(kind, direction):
    check_onnx_node(kind, recurrent_inputs(kind, direction), direction=direction)
    check_onnx_node(kind, recurrent_inputs(kind, direction, bias=False, initial=False), direction=direction)
    check_onnx_node(kind, recurrent_inputs(kind, direction, lengths=True), direction=direction)


def test_lstm_with_peepholes_and_coupled_gates():
    check_onnx_node(
        "LSTM", recurrent_inputs("LSTM", "bidirectional", peephole=True, lengths=True), direction="bidirectional"
    )
    check_onnx_node("LSTM", recurrent_inputs("LSTM", "forward"), input_forget=1)


def test_gru_with_linear_before_reset():
    check_onnx_node("GRU", recurrent_inputs("GRU", "bidirectional"), direction="bidirectional", linear_before_reset=1)


@pytest.mark.parametrize("kind", GATES)
def test_clips(kind):
    check_onnx_node(
        kind,
        [3 * x if x is not None and x.dtype == np.float32 else x for x in recurrent_inputs(kind, "forward")],
        clip=0.7,
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Relu", {}),
        ("LeakyRelu", {"activation_alpha": [0.2]}),
        ("ThresholdedRelu", {"activation_alpha": [0.1]}),
        ("ScaledTanh", {"activation_alpha": [0.7], "activation_beta": [1.3]}),
        ("HardSigmoid", {"activation_alpha": [0.3], "activation_beta": [0.4]}),
        ("Elu", {"activation_alpha": [0.8]}),
        ("Softsign", {}),
        ("Softplus", {}),
        ("Affine", {"activation_alpha": [0.5], "activation_beta": [0.1]}),
    ],
)
def test_activations(name, more):
    check_onnx_node("RNN", recurrent_inputs("RNN", "forward"), activations=[name], **more)


def test_alphas_are_assigned_in_order():
    activations = ["HardSigmoid", "LeakyRelu", "Tanh", "Sigmoid", "ScaledTanh", "Relu"]
    more = {"activation_alpha": [0.3, 0.1, 0.6], "activation_beta": [0.4, 1.2]}
    check_onnx_node(
        "LSTM", recurrent_inputs("LSTM", "bidirectional"), direction="bidirectional", activations=activations, **more
    )
