"""Activations and elementwise functions against onnxruntime: large values, kinks, single and half precision."""

from math import erf

import numpy as np
import pytest
from numpy_node import assert_node_gives
from onnxruntime_node import assert_matches_onnxruntime

X = np.concatenate([np.linspace(-6, 6, 41), [-60, -20, -1e-4, 0, 1e-4, 20, 60]]).astype(np.float32)
UNIT_INTERVAL = np.linspace(-0.99, 0.99, 33).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "attrs"),
    [
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("Relu", {}),
        ("LeakyRelu", {"alpha": 0.3}),
        ("ThresholdedRelu", {"alpha": 0.7}),
        ("Elu", {"alpha": 0.6}),
        ("Celu", {"alpha": 0.6}),
        ("Selu", {}),
        ("Selu", {"alpha": 0.5, "gamma": 2.0}),
        ("Gelu", {}),
        ("Gelu", {"approximate": "tanh"}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Mish", {}),
        ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
        ("HardSwish", {}),
        ("Shrink", {"bias": 0.3, "lambd": 1.0}),
        ("Erf", {}),
        ("Sin", {}),
        ("Cos", {}),
        ("Atan", {}),
        ("Asinh", {}),
        ("Neg", {}),
        ("Abs", {}),
    ],
)
def test_functions_of_all_numbers(kind, attrs):
    assert_matches_onnxruntime(kind, [X], attrs, domain="ai.onnx", tolerance=2e-6)


@pytest.mark.parametrize("kind", ["Asin", "Acos", "Atanh", "Tan", "Sinh", "Cosh", "Exp"])
def test_functions_within_their_domain(kind):
    assert_matches_onnxruntime(kind, [UNIT_INTERVAL], {}, domain="ai.onnx", tolerance=2e-6)


@pytest.mark.parametrize("kind", ["Log", "Sqrt", "Reciprocal", "Acosh"])
def test_functions_of_positive_numbers(kind):
    assert_matches_onnxruntime(
        kind, [np.linspace(1.1, 50, 33).astype(np.float32)], {}, domain="ai.onnx", tolerance=2e-6
    )


def test_slopes_broadcast():
    x = X[:24].reshape(2, 3, 4)
    assert_matches_onnxruntime("PRelu", [x, np.array([[0.1], [0.2], [-0.3]], np.float32)], {}, domain="ai.onnx")


def test_swish_and_swiglu():
    x, gate = X[:20], X[20:40]
    sigmoid = 1 / (1 + np.exp(-1.5 * gate.astype(np.float64)))
    assert_node_gives("Swish", [gate], (gate * sigmoid).astype(np.float32), {"alpha": 1.5}, opset=24, tolerance=1e-6)
    assert_node_gives(
        "SwiGLU", [gate, x], (gate * sigmoid * x).astype(np.float32), {"alpha": 1.5}, opset=28, tolerance=1e-6
    )


@pytest.mark.parametrize("kind", ["Sigmoid", "Tanh", "Gelu", "Softplus", "Erf", "Elu", "Mish", "HardSwish", "Shrink"])
def test_half_precision_inputs_give_half_precision_outputs(kind):

    x = X.astype(np.float16)
    wide = X.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))

    truths = {
        "Sigmoid": sigmoid,
        "Tanh": np.tanh(wide),
        "Gelu": wide * np.array([(1 + erf(v / 2**0.5)) / 2 for v in wide]),
        "Softplus": np.logaddexp(wide, 0),
        "Erf": np.array([erf(v) for v in wide]),
        "Elu": np.where(wide < 0, np.expm1(wide), wide),
        "Mish": wide * np.tanh(np.logaddexp(wide, 0)),
        "HardSwish": wide * np.clip(wide / 6 + 0.5, 0, 1),
        "Shrink": np.where(np.abs(wide) > 0.5, wide, 0),
    }
    assert_node_gives(kind, [x], truths[kind].astype(np.float16), tolerance=2e-3)
