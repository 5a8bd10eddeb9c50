"""Shape and index operators of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, module_outputs
from random_inputs import floats


@pytest.mark.parametrize("axis", [0, 2, -1, -3])
def test_expand_dims(axis):
    assert_matches_onnxruntime("ExpandDims", [floats(1, 2, 3), np.array(axis, dtype=np.int32)], tolerance=0)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, -1, 0, 2, 9])
def test_trilu(k, upper):
    inputs = [floats(1, 2, 3, 4), *([] if k is None else [np.array(k)])]
    assert_matches_onnxruntime("Trilu", inputs, {"upper": upper}, tolerance=0)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_pad(mode):
    pads = np.array([1, 0, 1, 2])
    extra = [np.array([7.0], dtype=np.float32)] if mode == "constant" else []
    assert_matches_onnxruntime("Pad", [floats(1, 3, 4), pads, *extra], {"mode": mode}, tolerance=0)
    assert_matches_onnxruntime("Pad", [floats(1, 3, 4), pads[None], *extra], {"mode": mode}, tolerance=0)


def test_gather_nd():
    assert_matches_onnxruntime("GatherND", [floats(1, 3, 4, 2), np.array([[0, 1], [2, 3]])], tolerance=0)


def test_range():
    assert_matches_onnxruntime("Range", [np.array(2), np.array(11), np.array(3)])
    assert_matches_onnxruntime(
        "Range", [np.array(0.5, dtype=np.float32), np.array(4.0, dtype=np.float32)], tolerance=1e-6
    )


def test_unique():
    assert_matches_onnxruntime(
        "Unique", [np.array([2, 1, 1, 3, 4, 3], dtype=np.float32)], outputs=("y", "places", "counts")
    )


def test_inverse():
    assert_matches_onnxruntime("Inverse", [floats(1, 2, 4, 4) + 4 * np.eye(4, dtype=np.float32)], tolerance=1e-5)


def test_torch_embedding():
    """Against numpy, as onnxruntime has no CPU kernel of it."""
    weight, indices = floats(1, 5, 3), np.array([[0, 4], [2, 2]])
    (actual,) = module_outputs("TorchEmbedding", [weight, indices], {}, ("y",))
    np.testing.assert_array_equal(actual, weight[indices])


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("corners", [0, 1])
def test_grid_sample(corners, mode, padding):
    grid = np.random.default_rng(2).uniform(-1.3, 1.3, size=(2, 5, 6, 2)).astype(np.float32)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    assert_matches_onnxruntime("GridSample", [floats(1, 2, 3, 4, 5), grid], attrs, tolerance=1e-5)


@pytest.mark.parametrize(("dim", "size", "step"), [(-1, 3, 1), (1, 2, 2), (0, 2, 1)])
def test_unfold_tensor(dim, size, step):
    assert_matches_onnxruntime(
        "UnfoldTensor", [floats(1, 2, 5, 6)], {"dim": dim, "size": size, "step": step}, tolerance=0
    )
