"""ONNX's own quantization operators against onnxruntime; integers must be equal."""

from functools import partial

import numpy as np
import pytest
import random_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime_node import assert_matches_onnxruntime, module_outputs, onnxruntime_outputs

floats = partial(random_inputs.floats, spread=10.0)

INT4, UINT4 = 22, 21  # ONNX TensorProto.DataType
INTEGER_TYPE_CODES = {np.uint8: 2, np.int8: 3, np.uint16: 4, np.int16: 5}
INTEGERS = [*INTEGER_TYPE_CODES, np.int32]
SCALE_SHAPES = [((), {}), ((3,), {"axis": 1}), ((4,), {"axis": -1}), ((2, 3, 2), {"axis": 2, "block_size": 2})]


def integers(seed, dtype, *shape):
    info = np.iinfo(dtype)
    low, high = (info.min, info.max) if info.bits < 32 else (-5000, 5000)
    return np.random.default_rng(seed).integers(low, high, size=shape, endpoint=True).astype(dtype)


def scales(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).uniform(0.01, 0.2, size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("shape", "attrs"), SCALE_SHAPES)
def test_dequantize_linear(shape, attrs, dtype):
    x, scale = integers(1, dtype, 2, 3, 4), scales(2, *shape)
    assert_matches_onnxruntime("DequantizeLinear", [x, scale], attrs, tolerance=1e-7, domain="ai.onnx")
    assert_matches_onnxruntime(
        "DequantizeLinear", [x, scale.astype(np.float16)], attrs, tolerance=1e-3, domain="ai.onnx"
    )
    if dtype != np.int32:
        assert_matches_onnxruntime(
            "DequantizeLinear", [x, scale, integers(3, dtype, *shape)], attrs, tolerance=1e-7, domain="ai.onnx"
        )


@pytest.mark.parametrize("dtype", INTEGER_TYPE_CODES)
@pytest.mark.parametrize(("shape", "attrs"), SCALE_SHAPES)
def test_quantize_linear(shape, attrs, dtype):
    x, scale = floats(1, 2, 3, 4), scales(2, *shape)
    assert_matches_onnxruntime("QuantizeLinear", [x, scale, integers(3, dtype, *shape)], attrs, domain="ai.onnx")
    assert_matches_onnxruntime(
        "QuantizeLinear",
        [x.astype(np.float16), scale.astype(np.float16), integers(3, dtype, *shape)],
        attrs,
        domain="ai.onnx",
    )
    assert_matches_onnxruntime("QuantizeLinear", [x, scale], attrs, domain="ai.onnx")
    assert_matches_onnxruntime(
        "QuantizeLinear", [x, scale], {**attrs, "output_dtype": INTEGER_TYPE_CODES[dtype]}, domain="ai.onnx"
    )


@pytest.mark.parametrize("opset", [11, 13, 19, 21])
def test_quantize_linear_saturates_and_rounds_halves_to_even(opset):
    x = np.array([-1e9, -3.5, -2.5, -0.5, 0.0, 0.5, 1.5, 2.5, 254.5, 255.5, 1e9, np.inf, -np.inf], dtype=np.float32)
    for dtype in (np.uint8, np.int8):
        inputs = [x, np.array(1, dtype=np.float32), np.array(3, dtype=dtype)]
        assert_matches_onnxruntime("QuantizeLinear", inputs, domain="ai.onnx", opset=opset)
        assert_matches_onnxruntime(
            "DequantizeLinear", [x[1:-3].astype(dtype), *inputs[1:]], tolerance=1e-7, domain="ai.onnx", opset=opset
        )


@pytest.mark.parametrize("kind", [INT4, UINT4])
def test_4_bit_types(kind):
    """Against numpy, as onnxruntime's Python returns no 4-bit tensors. They are bytes here, of the type output_dtype."""
    low, high, dtype = (-8, 7, np.int8) if kind == INT4 else (0, 15, np.uint8)
    x, scale = floats(1, 4, 6), scales(2, 4, 3)
    zero_point = np.random.default_rng(3).integers(low, high, size=(4, 3)).astype(dtype)
    attrs = {"axis": 1, "block_size": 2}
    (actual,) = module_outputs(
        "QuantizeLinear", [x, scale, zero_point], {**attrs, "output_dtype": kind}, ("y",), domain="ai.onnx"
    )
    blocks = [np.repeat(values, 2, axis=1) for values in (scale, zero_point)]
    np.testing.assert_array_equal(actual, np.clip(np.rint(x / blocks[0]) + blocks[1], low, high))
    assert_matches_onnxruntime(
        "DequantizeLinear",
        [actual, scale, zero_point],
        attrs,
        tolerance=1e-7,
        domain="ai.onnx",
        input_types={0: kind, 2: kind},
    )


@settings(max_examples=40)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_dynamic_quantize_linear(values):
    x = np.array(values, dtype=np.float32)
    assert_matches_onnxruntime(
        "DynamicQuantizeLinear", [x], outputs=("y", "scale", "zero_point"), tolerance=0, domain="ai.onnx"
    )


@pytest.mark.parametrize("a_type", [np.uint8, np.int8])
@pytest.mark.parametrize("b_type", [np.uint8, np.int8])
@pytest.mark.parametrize(("a_zero", "b_zero"), [(None, None), ((), ()), ((3,), (5,))])
def test_mat_mul_integer(a_zero, b_zero, a_type, b_type):
    if a_zero == (3,):
        a_zero = ()  # onnxruntime refuses one a row
    zeros = [None if s is None else integers(3, t, *s) for s, t in ((a_zero, a_type), (b_zero, b_type))]
    for k in (7, 300, 5000):
        assert_matches_onnxruntime(
            "MatMulInteger", [integers(1, a_type, 2, 3, k), integers(2, b_type, k, 5), *zeros], domain="ai.onnx"
        )


@pytest.mark.parametrize("k", [258, 259, 1024, 4112, 4113, 9000])
def test_the_largest_sums_of_integers(k):
    a, b = np.full((1, k), 255, dtype=np.uint8), np.full((k, 2), 255, dtype=np.uint8)
    assert_matches_onnxruntime("MatMulInteger", [a, b], domain="ai.onnx")
    assert_matches_onnxruntime("MatMulInteger", [a, np.full((k, 2), -128, dtype=np.int8)], domain="ai.onnx")


@pytest.mark.parametrize("a_type", [np.uint8, np.int8])
@pytest.mark.parametrize("b_shape", [(), (5,)])
def test_q_linear_mat_mul(b_shape, a_type):
    for b_type in (np.uint8, np.int8) if a_type == np.uint8 else (np.int8,):
        inputs = [
            integers(1, a_type, 2, 3, 40),
            scales(2),
            integers(3, a_type),
            integers(4, b_type, 40, 5),
            scales(5, *b_shape),
        ]
        inputs += [integers(6, b_type, *b_shape), np.array(3.0, dtype=np.float32), integers(7, a_type)]
        assert_matches_onnxruntime("QLinearMatMul", inputs, domain="ai.onnx")


CONVS = [
    ({}, (2, 3, 8, 9), (4, 3, 3, 2)),
    ({"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}, (1, 3, 8, 9), (4, 3, 3, 2)),
    ({"group": 2, "auto_pad": "SAME_UPPER"}, (1, 4, 7, 7), (6, 2, 3, 3)),
    ({"pads": [1, 1]}, (2, 3, 9), (4, 3, 3)),
    ({}, (1, 600, 3, 3), (2, 600, 3, 3)),
]


@pytest.mark.parametrize(("attrs", "x_shape", "w_shape"), CONVS)
def test_conv_integer(attrs, x_shape, w_shape):
    x, w = integers(1, np.uint8, *x_shape), integers(2, np.uint8, *w_shape)
    assert_matches_onnxruntime("ConvInteger", [x, w], attrs, domain="ai.onnx")
    assert_matches_onnxruntime(
        "ConvInteger", [x, w, integers(3, np.uint8), integers(4, np.uint8)], attrs, domain="ai.onnx"
    )


def test_conv_integer_with_a_zero_point_per_channel():
    """Channel by channel, as onnxruntime takes one zero point for all of them."""
    x, w, zero_points = integers(1, np.uint8, 1, 3, 5, 5), integers(2, np.uint8, 4, 3, 2, 2), integers(3, np.uint8, 4)
    (actual,) = module_outputs(
        "ConvInteger", [x, w, np.array(7, dtype=np.uint8), zero_points], {}, ("y",), domain="ai.onnx"
    )
    for i, zero_point in enumerate(zero_points):
        inputs = [x, w[i : i + 1], np.array(7, dtype=np.uint8), np.array(zero_point)]
        (expected,) = onnxruntime_outputs("ConvInteger", inputs, {}, ("y",), domain="ai.onnx")
        np.testing.assert_array_equal(actual[:, i : i + 1], expected)


@pytest.mark.parametrize(("attrs", "x_shape", "w_shape"), CONVS)
@pytest.mark.parametrize("types", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_q_linear_conv(by_channel, types, attrs, x_shape, w_shape):
    x_type, w_type = types
    shape = (w_shape[0],) if by_channel else ()
    inputs = [
        integers(1, x_type, *x_shape),
        scales(2),
        integers(3, x_type),
        integers(4, w_type, *w_shape),
        scales(5, *shape),
    ]
    zeros = np.full(shape, 0 if w_type == np.int8 else 120, dtype=w_type)
    inputs += [zeros, np.array(2.0, dtype=np.float32), integers(7, x_type)]
    assert_matches_onnxruntime("QLinearConv", inputs, attrs, domain="ai.onnx")
    bias = np.random.default_rng(8).integers(-1000, 1000, size=w_shape[0]).astype(np.int32)
    assert_matches_onnxruntime("QLinearConv", [*inputs, bias], attrs, domain="ai.onnx")
