"""Resizing along axes: each axis is a matrix of weights made on the host, or for the nearest element a gather."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import axis_shape, take
from mlx_transmuter.ops.functional.interpolation import cubic_kernel_far, cubic_kernel_near
from mlx_transmuter.ops.onnx.casting import saturating_cast
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("Resize-10")
def resize_10(x, scales: HostArray, *, mode="nearest"):
    """x scaled along each axis, element i at i / scale, rounded down. ONNX Resize-10."""
    return _resize(x, scales=scales, mode=mode, coordinates="asymmetric", nearest_mode="floor")


@op("Upsample-9")
def upsample(x, scales: HostArray, *, mode="nearest"):
    """Resize-10 by its older name. ONNX Upsample-9."""
    return resize_10(x, scales, mode=mode)


@op("Resize-11")
def resize(
    x,
    roi: HostArray = None,
    scales: HostArray = None,
    sizes: HostArray = None,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch",
    mode="nearest",
    nearest_mode="round_prefer_floor",
):
    """x scaled by scales, or to sizes, along axes (all by default), by nearest, linear or cubic weights.

    roi float [2 * r], the starts then the ends, for tf_crop_and_resize. ONNX Resize-11, 13, 18, 19.
    """
    return _resize(
        x,
        roi=None if roi is None or not roi.size else roi,
        scales=None if scales is None or not scales.size else scales,
        sizes=None if sizes is None or not sizes.size else sizes,
        axes=axes,
        mode=mode,
        coordinates=coordinate_transformation_mode,
        nearest_mode=nearest_mode,
        antialias=bool(antialias),
        cubic=cubic_coeff_a,
        exclude=bool(exclude_outside),
        outside=extrapolation_value,
        policy=keep_aspect_ratio_policy,
    )


def _resize(
    x,
    *,
    scales=None,
    sizes=None,
    roi=None,
    axes=None,
    mode,
    coordinates,
    nearest_mode,
    antialias=False,
    cubic=-0.75,
    exclude=False,
    outside=0.0,
    policy="stretch",
) -> mx.array:
    if mode not in ("nearest", "linear", "cubic"):
        raise OperatorError(f"the mode {mode!r}", "nearest, linear or cubic")
    chosen = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    if sizes is not None:
        lengths = [int(n) for n in sizes]
        ratios = [n / x.shape[axis] for n, axis in zip(lengths, chosen, strict=True)]
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            ratios = [ratio] * len(chosen)
            lengths = [int(ratio * x.shape[axis] + 0.5) for axis in chosen]
    elif scales is not None:
        ratios = [float(s) for s in scales]
        lengths = [int(np.float32(x.shape[axis]) * np.float32(s)) for axis, s in zip(chosen, ratios, strict=True)]
    else:
        raise OperatorError("neither scales nor sizes", "one of them")
    y, blank = x, np.zeros((), bool)
    for i, (axis, ratio, length) in enumerate(zip(chosen, ratios, lengths, strict=True)):
        crop = (0.0, 1.0) if roi is None else (float(roi[i]), float(roi[len(chosen) + i]))
        if ratio == 1 and length == x.shape[axis] and (coordinates != "tf_crop_and_resize" or crop == (0.0, 1.0)):
            continue
        at = _source_coordinates(length, x.shape[axis], ratio, coordinates, crop)
        if coordinates == "tf_crop_and_resize":
            off = (at < 0) | (at > x.shape[axis] - 1)
            blank = blank | off.reshape(axis_shape(axis, x.ndim))
        if mode == "nearest":
            y = take(y, _nearest_indices(at, x.shape[axis], nearest_mode), axis)
        else:
            weights = _interpolation_weights(
                at, x.shape[axis], mode, min(ratio, 1.0) if antialias else 1.0, cubic, exclude
            )
            y = mx.moveaxis(mx.moveaxis(y.astype(mx.float32), axis, -1) @ mx.array(weights.T), -1, axis)
    if blank.any():
        y = mx.where(mx.array(blank), mx.array(outside, mx.float32).astype(y.dtype), y)
    return _saturate_to(y, x.dtype)


def _saturate_to(y: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns y in a type, integers rounded and saturated."""
    if y.dtype == dtype or mx.issubdtype(dtype, mx.floating):
        return y.astype(dtype)
    limits = mx.iinfo(dtype)
    return saturating_cast(mx.clip(mx.round(y), limits.min, limits.max), dtype)


def _source_coordinates(length: int, size: int, ratio: float, mode: str, roi: tuple[float, float]) -> np.ndarray:
    """Returns the coordinate of each of `length` elements of the result in an axis of `size` elements, float32.

    float32, as in onnxruntime, so that a scale of 0.6 gives integers where it would exactly.
    """
    i, scale, n = np.arange(length, dtype=np.float32), np.float32(ratio), np.float32(size)
    width = scale * n  # not a whole number where a scale gave it: ONNX's reference and its cases keep the fraction
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and length > 1):
        return (i + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return np.zeros_like(i)
    if mode == "half_pixel_symmetric":
        return n / 2 * (1 - length / width) + (i + 0.5) / scale - 0.5
    if mode == "asymmetric":
        return i / scale
    if mode == "tf_half_pixel_for_nn":
        return (i + 0.5) / scale
    if mode == "align_corners":
        return np.zeros_like(i) if width == 1 else i * (n - 1) / (width - 1)
    if mode == "tf_crop_and_resize":
        start, end = np.float32(roi[0]), np.float32(roi[1])
        if width == 1:
            return np.full_like(i, (start + end) * (n - 1) / 2)
        return start * (n - 1) + i * (end - start) * (n - 1) / (width - 1)
    raise OperatorError(f"the coordinates {mode!r}", "one of ONNX's coordinate_transformation_modes")


def _nearest_indices(at: np.ndarray, size: int, mode: str) -> np.ndarray:
    if mode == "round_prefer_floor":
        places = np.ceil(at - 0.5)
    elif mode == "round_prefer_ceil":
        places = np.floor(at + 0.5)
    elif mode in ("floor", "ceil"):
        places = np.floor(at) if mode == "floor" else np.ceil(at)
    else:
        raise OperatorError(f"the rounding {mode!r}", "round_prefer_floor, round_prefer_ceil, floor or ceil")
    return np.clip(places, 0, size - 1).astype(np.int32)


def _interpolation_weights(
    at: np.ndarray, size: int, mode: str, scale: float, cubic: float, exclude: bool
) -> np.ndarray:
    """Returns the weight of each input element (column) in each result (row); a scale < 1 widens the kernel."""
    reach = (1 if mode == "linear" else 2) / scale
    first = np.floor(at - reach).astype(np.int64) + 1
    places = first[:, None] + np.arange(math.ceil(2 * reach) + 1)
    distance = np.abs(places - at[:, None]) * scale
    if mode == "linear":
        weights = np.clip(1 - distance, 0, None)
    else:
        near, far = cubic_kernel_near(distance, cubic), cubic_kernel_far(distance, cubic)
        weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0))
    if exclude:
        weights = np.where((places >= 0) & (places < size), weights, 0)
    if exclude or scale < 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((at.size, size))
    np.add.at(matrix, (np.arange(at.size)[:, None], np.clip(places, 0, size - 1)), weights)
    return matrix.astype(np.float32)
