"""Softmax and the norms against onnxruntime and NumPy: axes, masked rows, half precision, statistics as outputs."""

import numpy as np
import pytest
from numpy_node import assert_node_gives, run_node
from onnxruntime_node import assert_matches_onnxruntime
from random_inputs import float_source

rng = np.random.default_rng(0)
floats = float_source(rng)


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize("axis", [None, -1, 0, 1])
def test_softmax(kind, opset, axis):
    attrs = {} if axis is None else {"axis": axis}
    assert_matches_onnxruntime(kind, [floats(2, 3, 4)], attrs, domain="ai.onnx", opset=opset)


def test_softmax_of_masked_rows():
    x = np.array([[-np.inf, 1.0, 2.0], [-np.inf, -np.inf, -np.inf]], np.float32)
    y = run_node("Softmax", [x])[0]
    np.testing.assert_allclose(y[0], [0, 1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-6)
    assert np.isnan(y[1]).all()
    huge = np.array([[60000, 60000, -60000]], np.float16)
    assert_node_gives("Softmax", [huge], np.array([[0.5, 0.5, 0]], np.float16))
    assert_node_gives("Softmax", [np.zeros((2, 0), np.float32)], np.zeros((2, 0), np.float32))
    assert_node_gives("LogSoftmax", [np.zeros((0, 2), np.float32)], np.zeros((0, 2), np.float32))


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("outputs", [("y",), ("y", "mean"), ("y", "mean", "inverse"), ("y", "", "inverse")])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(axis, outputs, bias):
    x = 3 + floats(2, 3, 4)
    rest = [floats(*x.shape[axis:]), *([floats(*x.shape[axis:])] if bias else [])]
    assert_matches_onnxruntime(
        "LayerNormalization", [x, *rest], {"axis": axis, "epsilon": 0.1}, outputs, domain="ai.onnx"
    )


def test_scales_that_broadcast():
    x, scale = 3 + floats(2, 3, 4), floats(1)
    wide = x.astype(np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    assert_node_gives("LayerNormalization", [x, scale], (normed * scale).astype(np.float32), tolerance=1e-5)
    normed = wide / np.sqrt((wide**2).mean((1, 2), keepdims=True) + 1e-5)
    assert_node_gives("RMSNormalization", [x, scale], (normed * scale).astype(np.float32), {"axis": 1}, tolerance=1e-5)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    assert_node_gives("RMSNormalization", [x, np.ones(4, np.float32)], normed.astype(np.float32), tolerance=1e-5)


def test_statistics_of_half_precision_inputs_are_float32():
    x = (1000 + 100 * floats(2, 8)).astype(np.float16)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)  # its squares overflow a half
    assert_node_gives("RMSNormalization", [x, np.ones(8, np.float16)], expected.astype(np.float16), tolerance=2e-3)


def test_batch_norm():
    x, channels = floats(2, 3, 4, 5), [floats(3) for _ in range(3)]
    assert_matches_onnxruntime(
        "BatchNormalization",
        [x, *channels, 0.5 + rng.random(3).astype(np.float32)],
        {"epsilon": 1e-3},
        domain="ai.onnx",
        opset=15,
    )
    assert_matches_onnxruntime(
        "BatchNormalization",
        [x[:, :, 0, 0], *channels, 0.5 + rng.random(3).astype(np.float32)],
        domain="ai.onnx",
        opset=9,
    )


def test_norms_of_images():
    x = floats(2, 4, 5, 3)
    assert_matches_onnxruntime("InstanceNormalization", [x, floats(4), floats(4)], {"epsilon": 1e-3}, domain="ai.onnx")
    assert_matches_onnxruntime(
        "GroupNormalization", [x, floats(4), floats(4)], {"num_groups": 2}, domain="ai.onnx", opset=21
    )
    assert_matches_onnxruntime("LRN", [x], {"size": 3, "alpha": 0.5, "bias": 2.0}, domain="ai.onnx")
    assert_matches_onnxruntime("LRN", [x], {"size": 5, "alpha": 0.5}, domain="ai.onnx", opset=11)
    for p in (1, 2):
        assert_matches_onnxruntime("LpNormalization", [x], {"axis": 1, "p": p}, domain="ai.onnx")
    assert_matches_onnxruntime("MeanVarianceNormalization", [x], domain="ai.onnx")
    assert_matches_onnxruntime("MeanVarianceNormalization", [x], {"axes": [1, 3]}, domain="ai.onnx")
