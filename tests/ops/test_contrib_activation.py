"""Activations of com.microsoft against onnxruntime, and against numpy where it has no CPU kernel."""

import math
from functools import partial

import numpy as np
import pytest
import random_inputs
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs

floats = partial(random_inputs.floats, spread=3.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_activations(dtype, tolerance):
    x, bias = floats(1, 2, 3, 16, dtype=dtype), floats(2, 16, dtype=dtype)
    assert_matches_onnxruntime("FastGelu", [x], tolerance=tolerance)
    assert_matches_onnxruntime("FastGelu", [x, bias], tolerance=tolerance)
    assert_matches_onnxruntime("ScaledSiLU", [x], {"alpha": 0.7}, tolerance=tolerance)
    assert_matches_onnxruntime("ScaledSiLU", [x, np.array(1.5, dtype=dtype)], tolerance=tolerance)
    assert_matches_onnxruntime("GatedAdd", [x, x[::-1].copy(), bias[:6].reshape(2, 3, 1)], tolerance=tolerance)
    if dtype == np.float32:  # onnxruntime has no float16 form of these
        assert_matches_onnxruntime("Gelu", [x], tolerance=tolerance)
        assert_matches_onnxruntime("BiasGelu", [x, bias], tolerance=tolerance)
        assert_matches_onnxruntime("QuickGelu", [x], tolerance=tolerance)
        assert_matches_onnxruntime("QuickGelu", [x], {"alpha": 0.5}, tolerance=tolerance)


def test_activations_of_large_inputs():
    x = np.array([-1e4, -80.0, -9.0, 0.0, 9.0, 80.0, 1e4], dtype=np.float32)
    for kind in ("FastGelu", "Gelu", "QuickGelu"):
        assert_matches_onnxruntime(kind, [x], tolerance=1e-9)


def numpy_gelu(x):
    return (x * 0.5 * (1 + np.vectorize(math.erf)(x.astype(np.float64) / math.sqrt(2)))).astype(x.dtype)


def test_sums_with_a_bias():
    x, bias, skip = floats(1, 2, 3, 16), floats(2, 16), floats(3, 2, 3, 16)
    (actual,) = module_outputs("BiasSplitGelu", [x, bias], {}, ("y",))
    assert_outputs_close((x + bias)[..., :8] * numpy_gelu((x + bias)[..., 8:]), actual, 1e-6)
    (actual,) = module_outputs("BiasAdd", [x, bias, skip], {}, ("y",))
    assert_outputs_close(x + bias + skip, actual, 1e-6)
    actual, mask = module_outputs("BiasDropout", [x, bias, skip], {}, ("y", "mask"))
    assert_outputs_close(x + bias + skip, actual, 1e-6)
    assert mask.all()
    projection = floats(4, 16, 1) / 16
    (actual,) = module_outputs("GatedAdd", [x, skip, x, projection], {}, ("y",))
    assert_outputs_close(x + skip / (1 + np.exp(-(x @ projection))), actual, 1e-5)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_swiglu(limit):
    gate, up = floats(1, 2, 3, 8), floats(2, 2, 3, 8)
    g, u = (np.minimum(gate, limit), np.clip(up, -limit, limit)) if limit else (gate, up)
    expected = g / (1 + np.exp(-1.7 * g)) * (u + 0.5)
    attrs = {"activation_alpha": 1.7, "activation_beta": 0.5, "limit": limit}
    assert_outputs_close(expected, module_outputs("SwiGLU", [gate, up], attrs, ("y",))[0], 1e-6)
    assert_outputs_close(
        expected, module_outputs("SwiGLU", [np.concatenate([gate, up], axis=-1)], attrs, ("y",))[0], 1e-6
    )


@pytest.mark.parametrize(("bias_shape", "inner"), [((2, 1, 1, 5), 1), ((1, 1, 4, 5), 0), ((4, 5), 0)])
def test_bias_softmax(bias_shape, inner):
    x, bias = floats(1, 2, 3, 4, 5), floats(2, *bias_shape)
    (expected,) = onnxruntime_outputs("Softmax", [x + bias], {"axis": 3}, ("y",), domain="ai.onnx")
    (actual,) = module_outputs("BiasSoftmax", [x, bias], {"axis": 3, "is_inner_broadcast": inner}, ("y",))
    assert_outputs_close(expected, actual, 1e-6)
