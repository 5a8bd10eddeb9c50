"""Resizing, sampling and regions against onnxruntime."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime
from random_inputs import float_source

rng = np.random.default_rng(0)
floats = float_source(rng)


def check_onnx_node(kind, inputs, attrs, opset=21, tolerance=1e-5):
    assert_matches_onnxruntime(kind, inputs, attrs, domain="ai.onnx", opset=opset, tolerance=tolerance)


COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(
    "scales", [(1.0, 1.0, 2.0, 1.5), (1.0, 1.0, 0.6, 0.5), (1.0, 1.0, 3.4, 2.0), (1.0, 1.0, 0.2, 0.5)]
)
def test_linear_and_cubic(coordinates, scales):
    x = floats(1, 2, 5, 6)
    attrs = {"coordinate_transformation_mode": coordinates}
    for mode in ("linear", "cubic"):
        check_onnx_node("Resize", [x, None, np.array(scales, np.float32)], attrs | {"mode": mode}, opset=19)
    more = {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}
    check_onnx_node("Resize", [x, None, np.array(scales, np.float32)], attrs | more, opset=19)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest(coordinates, nearest):
    x = floats(2, 1, 4, 6)
    attrs = {"coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
    # Scales that are whole in binary: at a tie one rounding more or less takes another element.
    for scales in ((1.0, 1.0, 2.0, 1.5), (1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 0.25, 2.5)):
        check_onnx_node("Resize", [x, None, np.array(scales, np.float32)], attrs, opset=19)


def test_scales_that_binary_floats_round():
    attrs = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "floor"}
    check_onnx_node("Resize", [floats(1, 1, 5, 10), None, np.array([1, 1, 0.6, 0.7], np.float32)], attrs, opset=19)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_sizes_along_axes(policy, mode):
    attrs = {"axes": [3, 2], "keep_aspect_ratio_policy": policy, "mode": mode}
    check_onnx_node("Resize", [floats(1, 2, 4, 6), None, None, np.array([9, 3])], attrs, opset=19)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_antialias_when_smaller(mode):
    scales = np.array([1, 1, 0.4, 0.7], np.float32)
    check_onnx_node(
        "Resize", [floats(1, 2, 9, 8), None, scales], {"antialias": 1, "mode": mode}, opset=19, tolerance=1e-4
    )


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_crop_and_resize(mode):
    attrs = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0, "mode": mode}
    roi = np.array([0, 0, 0.2, -0.3, 1, 1, 0.9, 1.2], np.float32)
    check_onnx_node("Resize", [floats(1, 1, 5, 6), roi, None, np.array([1, 1, 4, 8])], attrs, opset=13)


def test_older_operator_versions():
    x, scales = floats(1, 1, 3, 4), np.array([1, 1, 2, 1.5], np.float32)
    check_onnx_node("Resize", [x, scales], {"mode": "linear"}, opset=10)
    check_onnx_node("Resize", [x, scales], {"mode": "nearest"}, opset=10)
    check_onnx_node("Upsample", [x, scales], {"mode": "nearest"}, opset=9)


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [0, 1])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample_modes(mode, padding_mode, align_corners):
    attrs = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    grid = rng.uniform(-1.6, 1.6, (2, 3, 7, 2)).astype(np.float32)
    check_onnx_node("GridSample", [floats(2, 3, 5, 4), grid], attrs, opset=20)
    if mode != "cubic":
        grid = rng.uniform(-1.6, 1.6, (1, 2, 3, 4, 3)).astype(np.float32)
        check_onnx_node("GridSample", [floats(1, 2, 3, 5, 4), grid], attrs, opset=20)
    old = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    grid = rng.uniform(-1.2, 1.2, (1, 2, 2, 2)).astype(np.float32)
    check_onnx_node("GridSample", [floats(1, 1, 4, 4), grid], attrs | {"mode": old}, opset=16)


@pytest.mark.parametrize("align_corners", [0, 1])
def test_affine_grid(align_corners):
    for size in ([2, 1, 3, 4], [1, 1, 2, 3, 4]):
        theta = floats(size[0], len(size) - 2, len(size) - 1)
        check_onnx_node("AffineGrid", [theta, np.array(size)], {"align_corners": align_corners}, opset=20)


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("samples", [0, 2])
def test_roi_align(mode, opset, samples):
    boxes = np.array([[0, 0, 9, 9], [2.3, 1.1, 30.5, 8.7], [5, 5, 5.5, 5.2]], np.float32)
    attrs = {"mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": samples, "spatial_scale": 0.5}
    if (mode, opset) == ("max", 10):
        return  # onnxruntime's own maximum of opset 10 takes other corners than ONNX
    check_onnx_node("RoiAlign", [floats(2, 3, 8, 7), boxes, np.array([0, 1, 1])], attrs, opset=opset)


def test_max_roi_pool():
    boxes = np.array([[0, 0, 0, 9, 9], [1, 2, 1, 30, 8], [1, 5, 5, 5, 5]], np.float32)
    check_onnx_node("MaxRoiPool", [floats(2, 3, 8, 7), boxes], {"pooled_shape": [3, 2], "spatial_scale": 0.5})


@pytest.mark.parametrize("center", [0, 1])
def test_non_max_suppression(center):
    boxes = rng.random((2, 20, 4)).astype(np.float32)
    scores = rng.random((2, 3, 20)).astype(np.float32)
    for most, overlap, least in ((5, 0.3, 0.2), (20, 0.5, None), (0, 0.5, 0.0)):
        rest = [
            np.array([most]),
            np.array([overlap], np.float32),
            None if least is None else np.array([least], np.float32),
        ]
        given = [boxes, scores, *(rest if rest[-1] is not None else rest[:-1])]
        check_onnx_node("NonMaxSuppression", given, {"center_point_box": center})
