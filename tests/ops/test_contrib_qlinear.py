"""Operators of com.microsoft on quantized tensors against onnxruntime.

onnxruntime combines scales before it rounds, so a value between two integers may be rounded to either of them.
"""

import numpy as np
import pytest
from onnxruntime_node import module_outputs, onnxruntime_outputs
from random_inputs import integers

TYPES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])


def scale_and_zero_point(seed, dtype, scale=0.03):
    factor = np.random.default_rng(seed).uniform(0.5, 2)  # no simple ratio, so that ties are few
    return [np.array(scale * factor, dtype=np.float32), integers(seed, dtype)]


def assert_within_one_step(op_type, inputs, attrs=None, most=1):
    (expected,) = onnxruntime_outputs(op_type, inputs, attrs or {}, ("y",))
    (actual,) = module_outputs(op_type, inputs, attrs or {}, ("y",))
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    steps = np.abs(actual.astype(np.int32) - expected.astype(np.int32))
    assert steps.max() <= most
    assert (steps > 0).mean() <= 0.02  # ties are few


@TYPES
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_binary(op_type, dtype):
    a, b = integers(1, dtype, 2, 3, 40), integers(2, dtype, 3, 1)
    assert_within_one_step(
        op_type,
        [a, *scale_and_zero_point(3, dtype), b, *scale_and_zero_point(4, dtype), *scale_and_zero_point(5, dtype, 0.1)],
    )
    if op_type == "QLinearAdd":  # onnxruntime infers no type for the other
        assert_within_one_step(
            op_type,
            [a, *scale_and_zero_point(3, dtype), b, *scale_and_zero_point(4, dtype), np.array(0.17, dtype=np.float32)],
        )


@TYPES
def test_unary(dtype):
    x = integers(1, dtype, 2, 128)
    assert_within_one_step(
        "QLinearSigmoid",
        [
            x,
            *scale_and_zero_point(2, dtype),
            np.array(1 / 256, dtype=np.float32),
            np.array(-3 if dtype == np.int8 else 5, dtype=dtype),
        ],
    )
    assert_within_one_step(
        "QLinearLeakyRelu", [x, *scale_and_zero_point(2, dtype), *scale_and_zero_point(3, dtype)], {"alpha": 0.2}
    )


@TYPES
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("opset", [12, 13])
def test_softmax(opset, axis, dtype):
    x, zero = integers(1, dtype, 3, 4, 5), np.array(np.iinfo(dtype).min, dtype=dtype)
    inputs = [x, np.array(0.02, dtype=np.float32), zero, np.array(1 / 256, dtype=np.float32), zero]
    assert_within_one_step("QLinearSoftmax", inputs, {"axis": axis, "opset": opset})


@TYPES
def test_concat_and_where(dtype):
    a, b = integers(1, dtype, 2, 30), integers(2, dtype, 2, 20)
    parts = [*scale_and_zero_point(3, dtype), a, *scale_and_zero_point(4, dtype), b, *scale_and_zero_point(5, dtype)]
    assert_within_one_step("QLinearConcat", parts, {"axis": 1})
    condition = np.random.default_rng(6).random((2, 30)) > 0.5
    assert_within_one_step(
        "QLinearWhere",
        [
            condition,
            a,
            *scale_and_zero_point(4, dtype),
            integers(7, dtype, 1, 30),
            *scale_and_zero_point(5, dtype),
            *scale_and_zero_point(3, dtype),
        ],
    )


@TYPES
@pytest.mark.parametrize("channels_last", [0, 1])
def test_pooling(channels_last, dtype):
    x = integers(1, dtype, 2, 6, 7, 5)
    inputs = [x, *scale_and_zero_point(2, dtype), *scale_and_zero_point(3, dtype)]
    assert_within_one_step("QLinearGlobalAveragePool", inputs, {"channels_last": channels_last})
    attrs = {"channels_last": channels_last, "kernel_shape": [2, 3], "strides": [2, 1], "pads": [0, 1, 1, 1]}
    assert_within_one_step("QLinearAveragePool", inputs, attrs)
    assert_within_one_step("QLinearAveragePool", inputs, {**attrs, "count_include_pad": 1})


def test_reduce_mean():
    """Against numpy, as onnxruntime has no CPU kernel of it."""
    x = integers(1, np.uint8, 2, 3, 4)
    inputs = [x, np.array(0.1, dtype=np.float32), np.array(9, dtype=np.uint8), np.array(0.05, dtype=np.float32)]
    (actual,) = module_outputs(
        "QLinearReduceMean", [*inputs, np.array(100, dtype=np.uint8)], {"axes": [1], "keepdims": 1}, ("y",)
    )
    mean = (x.astype(np.float64) - 9).mean(axis=1, keepdims=True) * 0.1
    np.testing.assert_allclose(actual, np.clip(np.rint(mean / 0.05) + 100, 0, 255), atol=1)


@pytest.mark.parametrize("channels_last", [0, 1])
def test_conv(channels_last):
    x = integers(1, np.uint8, 2, 6, 7, 3) if channels_last else integers(1, np.uint8, 2, 3, 6, 7)
    inputs = [x, *scale_and_zero_point(2, np.uint8), integers(3, np.int8, 4, 3, 2, 2), np.array(0.01, dtype=np.float32)]
    inputs += [np.array(0, dtype=np.int8), *scale_and_zero_point(5, np.uint8, 0.5)]
    assert_within_one_step("QLinearConv", inputs, {"channels_last": channels_last, "pads": [1, 0, 0, 1]}, most=0)
