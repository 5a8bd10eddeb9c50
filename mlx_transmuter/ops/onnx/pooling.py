"""Pooling of [batch, channels, *space] over windows, over whole images, and its inverse."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import put_along_axis
from mlx_transmuter.ops.functional.sliding_windows import SlidingWindows, pad_for_windows, place_windows, window_view
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import HostArray, op


def _kernel_axes(x: mx.array) -> tuple[int, ...]:
    """Returns the axes of the kernel in a view of windows over x."""
    space = x.ndim - 2
    return tuple(range(2 + space, 2 + 2 * space))


def _lowest_value(dtype: mx.Dtype) -> float:
    return -math.inf if mx.issubdtype(dtype, mx.floating) else mx.iinfo(dtype).min


@op("MaxPool-8")
def max_pool(
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    pads=None,
    storage_order=0,
    strides=None,
    outputs=1,
):
    """The largest element of each window, then its index in the flattened x.

    The index counts the spatial axes from the first one on if storage_order, else from the last one on.
    ONNX MaxPool-8, 10, 11, 12, 22.
    """
    w = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    over = window_view(pad_for_windows(x, w, _lowest_value(x.dtype)), w)
    axes = _kernel_axes(x)
    y = mx.max(over, axis=axes)
    if outputs == 1:
        return y
    place = mx.argmax(over.reshape(*over.shape[: axes[0]], -1), axis=-1).astype(mx.int32)
    return y, _flat_indices_of_maxima(x, w, place, storage_order)


def _flat_indices_of_maxima(x: mx.array, w: SlidingWindows, place: mx.array, storage_order: int) -> mx.array:
    """Returns the index in the flattened x of the element `place` of each window, [batch, channels, *count]."""
    space = x.shape[2:]
    order = range(len(space)) if storage_order else reversed(range(len(space)))
    sizes = 1
    flat = mx.zeros_like(place)
    strides = {}
    for axis in order:
        strides[axis], sizes = sizes, sizes * space[axis]
    for axis in reversed(range(len(space))):
        inside, place = place % w.kernel[axis], place // w.kernel[axis]
        first = np.arange(w.counts[axis], dtype=np.int32) * w.strides[axis] - w.pad_before[axis]
        first = mx.array(first.reshape([-1 if i == axis + 2 else 1 for i in range(flat.ndim)]))
        flat = flat + (first + inside * w.dilations[axis]) * strides[axis]
    planes = np.arange(math.prod(x.shape[:2]), dtype=np.int32) * sizes
    return flat + mx.array(planes.reshape(*x.shape[:2], *[1] * len(space)))


@op("AveragePool-7")
def average_pool(
    x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, count_include_pad=0, dilations=None, pads=None, strides=None
):
    """The mean of each window, of its elements inside x, or inside the padding too.

    ONNX AveragePool-7, 10, 11, 19, 22.
    """
    w = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    total = mx.sum(window_view(pad_for_windows(x, w, 0), w), axis=_kernel_axes(x))
    counts = np.ones((), np.int64)
    for axis, n in enumerate(x.shape[2:]):
        places = np.arange(w.counts[axis])[:, None] * w.strides[axis] + np.arange(w.kernel[axis]) * w.dilations[axis]
        low, high = w.pad_before[axis], w.pad_before[axis] + n
        if count_include_pad:
            low, high = 0, high + w.pad_after[axis]
        counts = np.multiply.outer(counts, ((places >= low) & (places < high)).sum(axis=1))
    return (total / mx.array(counts.astype(np.float32))).astype(x.dtype)


@op("LpPool-2")
def lp_pool(x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, p=2, pads=None, strides=None):
    """The p-th root of the sum of |x| to the power of p over each window. ONNX LpPool-2, 11, 18, 22."""
    w = place_windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    return _pth_root(mx.sum(window_view(pad_for_windows(mx.abs(x) ** p, w, 0), w), axis=_kernel_axes(x)), p).astype(
        x.dtype
    )


def _pth_root(x: mx.array, p: int) -> mx.array:
    return mx.sqrt(x) if p == 2 else x ** (1 / p)


@op("GlobalMaxPool-1")
def global_max_pool(x):
    """The largest element of each channel: [batch, channels, 1, ...]. ONNX GlobalMaxPool-1, 22."""
    return mx.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@op("GlobalAveragePool-1")
def global_average_pool(x):
    """The mean of each channel: [batch, channels, 1, ...]. ONNX GlobalAveragePool-1, 22."""
    return mx.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@op("GlobalLpPool-2")
def global_lp_pool(x, *, p=2):
    """The p-th root of the sum of |x| to the power of p of each channel: [batch, channels, 1, ...].

    ONNX GlobalLpPool-2, 22.
    """
    return _pth_root(mx.sum(mx.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True), p).astype(x.dtype)


@op("MaxUnpool-9")
def max_unpool(x, indices: Indices, output_shape: HostArray = None, *, kernel_shape, pads=None, strides=None):
    """Zeros with x's elements at indices of the flattened result, whose shape is MaxPool's input.

    ONNX MaxUnpool-9, 11, 22.
    """
    rank = len(kernel_shape)
    strides, pads = strides or [1] * rank, pads or [0] * (2 * rank)
    space = [(n - 1) * strides[i] - pads[i] - pads[rank + i] + kernel_shape[i] for i, n in enumerate(x.shape[2:])]
    inferred = [*x.shape[:2], *space]
    y = put_along_axis(mx.zeros(math.prod(inferred), x.dtype), Indices.of(indices).reshape(-1), x.reshape(-1), axis=0)
    y = y.reshape(inferred)
    if output_shape is None:
        return y
    return mx.pad(y, [(0, n - y.shape[i]) for i, n in enumerate(output_shape.tolist())])
