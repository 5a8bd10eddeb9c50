"""Sampling of images at points that a grid or learned offsets give."""

import itertools
import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import take_along_axis
from mlx_transmuter.ops.functional.interpolation import cubic_kernel_far, cubic_kernel_near
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("AffineGrid-20")
def affine_grid(theta, size: HostArray, *, align_corners=0):
    """The points of an image of that size moved by theta [batch, d, d + 1]: [batch, *space, d], x first.

    ONNX AffineGrid-20.
    """
    space = size.tolist()[2:]
    axes = [np.linspace(-1, 1, n) if align_corners else (np.arange(n) * 2 + 1) / n - 1 for n in space]
    points = np.stack([*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(space)], axis=-1)
    grid = mx.array(points.reshape(-1, len(space) + 1).astype(np.float32)).astype(theta.dtype) @ theta.swapaxes(-1, -2)
    return grid.reshape(theta.shape[0], *space, len(space))


@op("GridSample-16")
def grid_sample(x, grid, *, align_corners=0, mode="linear", padding_mode="zeros"):
    """x [batch, channels, *space] at the points grid [batch, *out, d] in [-1, 1], x first: [batch, channels, *out].

    mode nearest, linear or cubic; points outside are zeros, the border, or reflected. ONNX GridSample-16, 20, 22.
    """
    space = x.shape[2:]
    points = [
        _to_pixel_coordinate(grid[..., len(space) - 1 - axis].astype(mx.float32), n, align_corners)
        for axis, n in enumerate(space)
    ]
    mode = mode.removeprefix("bi")
    if padding_mode not in ("zeros", "border", "reflection") or mode not in ("nearest", "linear", "cubic"):
        raise OperatorError(
            f"the mode {mode!r} with {padding_mode!r}", "nearest, linear, cubic; zeros, border, reflection"
        )
    if mode == "nearest":
        points = [mx.round(p) for p in points]
    if mode != "cubic":  # which looks beyond the point's neighbors: there each element is brought inside by itself
        points = [_reflect_or_clip(p, n, padding_mode, align_corners) for p, n in zip(points, space, strict=True)]
    return interpolate(x, points, mode, padding_mode, align_corners)


def _to_pixel_coordinate(p: mx.array, n: int, align_corners: int) -> mx.array:
    return (p + 1) / 2 * (n - 1) if align_corners else ((p + 1) * n - 1) / 2


def _reflect_or_clip(p: mx.array, n: int, mode: str, align_corners: int) -> mx.array:
    """Returns the coordinates p along an axis of n elements, clipped to the border or reflected at it."""
    if mode == "border":
        return mx.clip(p, 0, n - 1)
    if mode == "zeros":
        return p
    low, high = (0.0, n - 1.0) if align_corners else (-0.5, n - 0.5)
    width = high - low
    if width == 0:
        return mx.zeros_like(p)
    distance = mx.remainder(mx.abs(p - low), 2 * width)
    return low + mx.where(distance > width, 2 * width - distance, distance)


def _cubic_weights(t: mx.array) -> list[mx.array]:
    """Returns Keys's weights (a = -0.75) of the elements at -1, 0, 1 and 2 for a point at t in [0, 1)."""
    a = -0.75
    return [
        cubic_kernel_far(t + 1, a),
        cubic_kernel_near(t, a),
        cubic_kernel_near(1 - t, a),
        cubic_kernel_far(2 - t, a),
    ]


def interpolate(
    x: mx.array, points: list[mx.array], mode: str, padding: str = "zeros", align_corners: int = 1
) -> mx.array:
    """Returns x [batch, channels, *space] at points, one [batch, *out] per spatial axis; `padding` as in GridSample."""
    taps = []
    for p, n in zip(points, x.shape[2:], strict=True):
        base = mx.floor(p)
        t = p - base
        if mode == "nearest":
            weights, base = [mx.ones_like(p)], mx.round(p)
        elif mode == "linear":
            weights = [1 - t, t]
        else:
            weights, base = _cubic_weights(t), base - 1
        along = []
        for i, weight in enumerate(weights):
            place = _reflect_or_clip(base + i, n, padding, align_corners)
            inside = (place >= 0) & (place <= n - 1)
            # A place that reflection leaves between two elements, half an element outside, is the border's.
            along.append(
                (
                    mx.clip(mx.round(place), 0, n - 1).astype(mx.int32),
                    mx.where(inside | (padding != "zeros"), weight, 0),
                )
            )
        taps.append(along)
    batch, channels, *space = x.shape
    flat = x.reshape(batch, channels, math.prod(space)).astype(mx.float32)
    total = mx.zeros((), mx.float32)
    for corner in itertools.product(*taps):
        index, weight = mx.zeros((), mx.int32), mx.ones((), mx.float32)
        for (place, share), n in zip(corner, space, strict=True):
            index, weight = index * n + place, weight * share
        # A point that is NaN has any place.
        index = mx.broadcast_to(index.reshape(batch, 1, -1), (batch, channels, index.size // batch))
        picked = take_along_axis(flat, index, axis=2)
        total = total + picked * weight.reshape(batch, 1, -1)
    return total.reshape(batch, channels, *points[0].shape[1:]).astype(x.dtype)


@op("DeformConv-19")
def deform_conv(
    x,
    w,
    offset,
    bias=None,
    mask=None,
    *,
    dilations=None,
    group=1,
    kernel_shape=None,
    offset_group=1,
    pads=None,
    strides=None,
):
    """Conv in two dimensions whose kernel elements are moved by offsets and scaled by a mask. ONNX DeformConv-19, 22.

    x [batch, in, h, w], w [out, in / group, kh, kw], offset [batch, offset_group * kh * kw * 2, oh, ow] (rows,
    columns), mask [batch, offset_group * kh * kw, oh, ow].
    """
    if x.ndim != 4:
        raise OperatorError(f"x {list(x.shape)}", "two spatial axes")
    batch, channels, out = x.shape[0], x.shape[1], w.shape[0]
    kernel, (rows, columns) = w.shape[2:], offset.shape[2:]
    strides, dilations, pads = strides or [1, 1], dilations or [1, 1], pads or [0] * 4
    taps = math.prod(kernel)
    moved = offset.reshape(batch * offset_group, taps, 2, rows, columns).astype(mx.float32)
    r, c = np.meshgrid(np.arange(kernel[0]) * dilations[0], np.arange(kernel[1]) * dilations[1], indexing="ij")
    first_r = (np.arange(rows) * strides[0] - pads[0])[:, None]
    first_c = (np.arange(columns) * strides[1] - pads[1])[None, :]
    points = [
        mx.array((r.reshape(-1, 1, 1) + first_r).astype(np.float32)) + moved[:, :, 0],
        mx.array((c.reshape(-1, 1, 1) + first_c).astype(np.float32)) + moved[:, :, 1],
    ]
    patches = interpolate(x.reshape(batch * offset_group, channels // offset_group, *x.shape[2:]), points, "linear")
    if mask is not None:
        patches = patches * mask.reshape(batch * offset_group, 1, taps, rows, columns)
    patches = patches.reshape(batch, group, channels // group * taps, rows * columns)
    y = (w.reshape(group, out // group, -1) @ patches).reshape(batch, out, rows, columns)
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)
