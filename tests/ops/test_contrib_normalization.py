"""Normalizations of com.microsoft, and SimplifiedLayerNormalization in the default domain, against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

FLOAT_TYPES = [(np.float32, 1e-5), (np.float16, 2e-3)]


@pytest.mark.parametrize(("dtype", "tolerance"), FLOAT_TYPES)
@pytest.mark.parametrize("axis", [-1, 1, 2])
def test_simplified_layer_normalization(axis, dtype, tolerance):
    x = floats(1, 2, 3, 8, dtype=dtype) * 3
    scale = floats(2, *x.shape[axis:], dtype=dtype)
    attrs = {"axis": axis, "epsilon": 1e-3}
    assert_matches_onnxruntime("SimplifiedLayerNormalization", [x, scale], attrs, domain="ai.onnx", tolerance=tolerance)


def test_simplified_layer_normalization_inverse_root():
    inputs = [floats(1, 2, 3, 8), floats(2, 8)]
    assert_matches_onnxruntime("SimplifiedLayerNormalization", inputs, {"axis": -1}, ("y", "inverse"), domain="ai.onnx")


@pytest.mark.parametrize(("dtype", "tolerance"), FLOAT_TYPES)
@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_skip_layer_normalization(bias, beta, skip, dtype, tolerance):
    x, gamma = floats(1, 2, 3, 8, dtype=dtype), floats(3, 8, dtype=dtype)
    inputs = [x, floats(2, *skip, dtype=dtype), gamma]
    inputs += [floats(4, 8, dtype=dtype) if beta else None, floats(5, 8, dtype=dtype) if bias else None]
    assert_matches_onnxruntime(
        "SkipLayerNormalization", inputs, {"epsilon": 1e-3}, ("y", "", "", "sum"), tolerance=tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), FLOAT_TYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 8), (5, 8)])
def test_skip_simplified_layer_normalization(shape, bias, dtype, tolerance):
    inputs = [floats(1, *shape, dtype=dtype), floats(2, *shape, dtype=dtype), floats(3, 8, dtype=dtype)]
    inputs += [floats(4, 8, dtype=dtype)] if bias else []
    assert_matches_onnxruntime(
        "SkipSimplifiedLayerNormalization", inputs, {"epsilon": 1e-3}, ("y", "", "", "sum"), tolerance=tolerance
    )


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("positions", [None, (1, 4), (2, 4)])
def test_embed_layer_normalization(positions, mask, segments):
    rng = np.random.default_rng(1)

    def ids(*shape, rows):
        return rng.integers(0, rows, size=shape).astype(np.int32)

    inputs = [ids(2, 4, rows=9), ids(2, 4, rows=2) if segments else None, floats(1, 9, 8), floats(2, 6, 8)]
    inputs += [floats(3, 2, 8) if segments else None, floats(4, 8), floats(5, 8)]
    inputs += [np.array([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=np.int32) if mask else None]
    inputs += [ids(*positions, rows=6)] if positions else []
    assert_matches_onnxruntime("EmbedLayerNormalization", inputs, {"epsilon": 1e-3}, ("y", "mask_index", "sum"))


@pytest.mark.parametrize(("dtype", "tolerance"), FLOAT_TYPES)
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_rms_norm(activation, dtype, tolerance):
    inputs = [floats(1, 2, 3, 24, dtype=dtype), floats(2, 8, dtype=dtype), floats(3, 2, 3, 24, dtype=dtype)]
    assert_matches_onnxruntime("GatedRMSNorm", inputs, {"activation": activation, "epsilon": 1e-3}, tolerance=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), FLOAT_TYPES)
@pytest.mark.parametrize("scale", [None, (3, 8), (24,), (8,)])
def test_branchwise_rms_norm(scale, dtype, tolerance):
    weights = [] if scale is None else [floats(2, *scale, dtype=dtype)]
    assert_matches_onnxruntime("BranchwiseRMSNorm", [floats(1, 2, 3, 8, dtype=dtype), *weights], tolerance=tolerance)
    assert_matches_onnxruntime(
        "BranchwiseRMSNorm", [floats(1, 2, 24, dtype=dtype), *weights], {"num_branches": 3}, tolerance=tolerance
    )


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("skip", [None, (2, 12), (2, 4, 5, 12)])
def test_group_norm(skip, channels_last, activation):
    """Against GroupNormalization of the sum, as onnxruntime has no CPU kernel of it."""
    x, gamma, beta = floats(1, 2, 12, 4, 5), floats(2, 12), floats(3, 12)
    attrs = {"groups": 3, "epsilon": 1e-3}
    last = np.moveaxis(x, 1, -1).copy()
    added = None if skip is None else floats(4, *skip)
    total = last if added is None else last + (added if added.ndim == 4 else added[:, None, None])
    by_channel = [np.moveaxis(total, -1, 1).copy(), gamma, beta]
    (expected,) = onnxruntime_outputs(
        "GroupNormalization", by_channel, {"num_groups": 3, "epsilon": 1e-3}, ("y",), domain="ai.onnx"
    )
    expected = expected / (1 + np.exp(-expected)) if activation else expected
    attrs |= {"activation": activation, "channels_last": channels_last}
    inputs = [last if channels_last else x, gamma, beta]
    if added is None:
        (actual,) = module_outputs("GroupNorm", inputs, attrs, ("y",))
    else:
        added = added if channels_last or added.ndim == 2 else np.moveaxis(added, -1, 1).copy()
        actual, sums = module_outputs("SkipGroupNorm", [*inputs, added], attrs, ("y", "sum"))
        assert_outputs_close(total if channels_last else by_channel[0], sums, 1e-6)
    assert_outputs_close(np.moveaxis(expected, 1, -1) if channels_last else expected, actual, 1e-5)
