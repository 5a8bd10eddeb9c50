"""Float matrix products and convolutions of com.microsoft against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

TRANSPOSES = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_fused_mat_mul(trans_a, trans_b, batch):
    a = floats(1, *batch, *((6, 4) if trans_a else (4, 6)))
    b = floats(2, *batch, *((5, 6) if trans_b else (6, 5)))
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.5}
    assert_matches_onnxruntime("FusedMatMul", [a, b], attrs)
    assert_matches_onnxruntime("TransposeMatMul", [a, b], attrs)


@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
@pytest.mark.parametrize(("batch_a", "batch_b"), TRANSPOSES[1:])
def test_fused_mat_mul_with_transposed_batch_axes(batch_a, batch_b, trans_a, trans_b):
    def operand(seed, rows, columns, last, behind):
        shape = (columns, rows) if last else (rows, columns)
        return floats(seed, *((shape[0], 2, 3, shape[1]) if behind else (2, 3, *shape)))

    a, b = operand(1, 4, 6, trans_a, batch_a), operand(2, 6, 5, trans_b, batch_b)
    assert_matches_onnxruntime(
        "FusedMatMul", [a, b], {"transA": trans_a, "transB": trans_b, "transBatchA": batch_a, "transBatchB": batch_b}
    )


ACTIVATIONS = ["", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid"]


@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a])
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSES)
def test_fused_gemm(trans_a, trans_b, activation):
    a, b = floats(1, *((6, 4) if trans_a else (4, 6))), floats(2, *((5, 6) if trans_b else (6, 5)))
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 2.0, "activation": activation}
    attrs |= {"activation_alpha": 0.3, "activation_beta": 0.6}
    assert_matches_onnxruntime("FusedGemm", [a, b, floats(3, 5)], attrs)


def test_operators_without_an_onnxruntime_cpu_kernel():
    a, b, bias = floats(1, 2, 4, 6), floats(2, 6, 5), floats(3, 5)
    (product,) = onnxruntime_outputs("FusedMatMul", [a, b], {"alpha": 0.5}, ("y",))
    (actual,) = module_outputs("FusedMatMulActivation", [a, b], {"alpha": 0.5, "activation": "Relu"}, ("y",))
    assert_outputs_close(np.maximum(product, 0), actual, 1e-6)
    (expected,) = onnxruntime_outputs("FastGelu", [a @ b, bias], {}, ("y",))
    (actual,) = module_outputs("GemmFastGelu", [a, b, bias], {}, ("y",))
    assert_outputs_close(expected, actual, 1e-5)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "Clip"])
@pytest.mark.parametrize("extra", [False, True])
def test_fused_conv(extra, activation):
    x, w, bias = floats(1, 2, 3, 6, 7), floats(2, 4, 3, 3, 2), floats(3, 4)
    attrs = {"pads": [1, 0, 1, 1], "strides": [2, 1]} | ({"activation": activation} if activation else {})
    parameters = {"LeakyRelu": [0.2], "HardSigmoid": [0.3, 0.4], "Clip": [-0.5, 0.7]}.get(activation)
    attrs |= {"activation_params": parameters} if parameters else {}
    (plain,) = onnxruntime_outputs(
        "FusedConv", [x, w, bias], {k: v for k, v in attrs.items() if k in ("pads", "strides")}, ("y",)
    )
    z = [floats(4, *plain.shape)] if extra else []
    assert_matches_onnxruntime("FusedConv", [x, w, bias, *z], attrs)
    # onnxruntime has no CPU kernel of the channels-last form here: the same, turned, is its truth.
    (expected,) = onnxruntime_outputs("FusedConv", [x, w, bias, *z], attrs, ("y",))
    turned = [np.moveaxis(x, 1, -1).copy(), w, bias, *(np.moveaxis(a, 1, -1).copy() for a in z)]
    (actual,) = module_outputs("NhwcFusedConv", turned, attrs, ("y",))
    assert_outputs_close(np.moveaxis(expected, 1, -1), actual, 1e-5)
    if not extra and not activation:
        (actual,) = module_outputs("NhwcConv", turned, attrs, ("y",))
        assert_outputs_close(np.moveaxis(expected, 1, -1), actual, 1e-5)
