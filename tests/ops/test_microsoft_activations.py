"""Activations of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import check


def floats(seed, *shape, dtype=np.float32):
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-6), (np.float16, 2e-3)])
def test_activations(dtype, tolerance):
    x, bias = floats(1, 2, 3, 16, dtype=dtype), floats(2, 16, dtype=dtype)
    check("FastGelu", [x], tolerance=tolerance)
    check("FastGelu", [x, bias], tolerance=tolerance)
    if dtype == np.float32:  # onnxruntime has no float16 form of these
        check("Gelu", [x], tolerance=tolerance)
        check("BiasGelu", [x, bias], tolerance=tolerance)
        check("QuickGelu", [x], tolerance=tolerance)
        check("QuickGelu", [x], {"alpha": 0.5}, tolerance=tolerance)


def test_far_from_zero():
    x = np.array([-1e4, -80.0, -9.0, 0.0, 9.0, 80.0, 1e4], dtype=np.float32)
    for kind in ("FastGelu", "Gelu", "QuickGelu"):
        check(kind, [x], tolerance=1e-9)
