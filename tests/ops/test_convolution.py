"""Convolutions and pools against onnxruntime: one to three dimensions, groups, dilations, padding of every kind."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, onnxruntime_outputs
from random_inputs import float_source

rng = np.random.default_rng(0)
floats = float_source(rng)


def check_onnx_node(kind, inputs, attrs, outputs=("y",), opset=21, tolerance=1e-5):
    assert_matches_onnxruntime(kind, inputs, attrs, outputs, domain="ai.onnx", opset=opset, tolerance=tolerance)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_conv(rank, group):
    space, kernel = (7, 6, 5)[:rank], (3, 2, 2)[:rank]
    x, w, bias = floats(2, 4, *space), floats(6, 4 // group, *kernel), floats(6)
    for more in (
        {},
        {"pads": [1, 0, 2][:rank] + [2, 1, 0][:rank]},
        {"strides": [2, 1, 2][:rank], "dilations": [2, 1, 1][:rank], "pads": [2] * (2 * rank)},
        {"auto_pad": "SAME_UPPER", "strides": [2] * rank},
        {"auto_pad": "SAME_LOWER"},
        {"auto_pad": "VALID", "strides": [3] * rank},
    ):
        check_onnx_node("Conv", [x, w, bias], {"group": group, "kernel_shape": list(kernel), **more})


def test_depthwise_conv():
    check_onnx_node("Conv", [floats(1, 6, 9), floats(6, 1, 3)], {"group": 6, "pads": [2, 0]})


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_conv_transpose(rank, group):
    space, kernel = (4, 3, 3)[:rank], (3, 2, 2)[:rank]
    x, w, bias = floats(2, 4, *space), floats(4, 3, *kernel), floats(3 * group)
    for more in (
        {},
        {"pads": [1, 0, 1][:rank] + [0, 1, 1][:rank]},
        {"strides": [2, 3, 2][:rank], "output_padding": [1, 0, 1][:rank]},
        {"strides": [2] * rank, "dilations": [2, 1, 2][:rank]},
        {"strides": [2] * rank, "auto_pad": "SAME_UPPER"},
        {"strides": [2] * rank, "auto_pad": "SAME_LOWER"},
        {"strides": [3] * rank, "output_shape": [12, 9, 8][:rank]},
        {"pads": [3, 1, 1][:rank] + [2, 1, 1][:rank]} if rank == 1 else {},
    ):
        check_onnx_node("ConvTranspose", [x, w, bias], {"group": group, **more})


POOLS = [
    {"kernel_shape": [3, 2]},
    {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [1, 1, 0, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [2, 2], "dilations": [2, 3]},
]


@pytest.mark.parametrize("attrs", POOLS)
def test_max_pool(attrs):
    x = floats(2, 3, 7, 8)
    for storage_order in (0, 1):
        names = ("y", "places")
        check_onnx_node("MaxPool", [x], attrs | {"storage_order": storage_order}, names, opset=12)
    check_onnx_node("MaxPool", [rng.integers(-128, 128, (1, 2, 7, 8)).astype(np.int8)], attrs, opset=12)


@pytest.mark.parametrize("attrs", POOLS)
@pytest.mark.parametrize("count_include_pad", [0, 1])
def test_average_pool(attrs, count_include_pad):
    check_onnx_node("AveragePool", [floats(2, 3, 7, 8)], attrs | {"count_include_pad": count_include_pad}, opset=19)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(p):
    for attrs in POOLS[:2] + POOLS[4:6]:
        check_onnx_node("LpPool", [floats(2, 3, 7, 8)], attrs | {"p": p}, opset=18)


@pytest.mark.parametrize("rank", [1, 3])
def test_pooling_in_one_and_three_dimensions(rank):
    x = floats(2, 3, *(6, 5, 4)[:rank])
    attrs = {"kernel_shape": [2] * rank, "strides": [2] * rank}
    check_onnx_node("MaxPool", [x], attrs, ("y", "places"))
    check_onnx_node("AveragePool", [x], attrs)
    for kind in ("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"):
        check_onnx_node(kind, [x], {})


def test_max_unpool():
    x = floats(1, 2, 4, 6)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    y, places = onnxruntime_outputs("MaxPool", [x], attrs, ("y", "places"), "ai.onnx")
    check_onnx_node("MaxUnpool", [y, places], attrs)


def test_col2im():
    attrs = {"strides": [2, 1], "dilations": [1, 2], "pads": [1, 0, 1, 2]}
    x = floats(2, 3 * 4, 15)
    check_onnx_node("Col2Im", [x, np.array([5, 5]), np.array([2, 2])], attrs)


def test_deform_conv():
    x, w = floats(2, 4, 6, 5), floats(3, 4, 2, 2)
    offset, mask = 2 * floats(2, 2 * 8, 5, 4), rng.random((2, 2 * 4, 5, 4)).astype(np.float32)
    attrs = {"offset_group": 2, "kernel_shape": [2, 2]}
    check_onnx_node("DeformConv", [x, w, offset, floats(3), mask], attrs, opset=19)
    check_onnx_node("DeformConv", [x, w, floats(2, 8, 3, 2)], {"strides": [2, 2], "pads": [0, 0, 0, 0]}, opset=19)
