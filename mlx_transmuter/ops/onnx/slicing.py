"""Parts of arrays and arrays of parts, by places known on the host: joining, splits, slices, padding, triangles."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.errors import shorten
from mlx_transmuter.ops.functional.indexing import take
from mlx_transmuter.ops.integer_ranges import range_of_inputs, same_range
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("Concat-4", integer_range=range_of_inputs())
def concat(*xs, axis):
    """The inputs one after another along `axis`. ONNX Concat-4, 11, 13."""
    return mx.concatenate(list(xs), axis=axis)


def split_by_sizes(x: mx.array, sizes: list[int], axis: int) -> tuple[mx.array, ...]:
    if min(sizes) < 0 or sum(sizes) != x.shape[axis]:
        raise OperatorError(f"parts of {shorten(sizes)}", f"parts that sum to {x.shape[axis]}")
    return tuple(mx.split(x, np.cumsum(sizes)[:-1].tolist(), axis=axis))


@op("Split-2", integer_range=same_range)
def split_2(x, *, axis=0, split=None, outputs):
    """x in parts of the sizes `split` along `axis`, or in equal parts. ONNX Split-2, 11."""
    return split_by_sizes(x, split or [x.shape[axis] // outputs] * outputs, axis)


@op("Split-13", integer_range=same_range)
def split_13(x, split: HostArray = None, *, axis=0, outputs):
    """x in parts of the sizes split, int64 [parts], along `axis`, or in equal parts. ONNX Split-13."""
    return split_2(x, axis=axis, split=None if split is None else split.tolist(), outputs=outputs)


@op("Split-18", integer_range=same_range)
def split_18(x, split: HostArray = None, *, axis=0, num_outputs=None, outputs):
    """x in parts of the sizes split, int64 [parts], along `axis`, or in num_outputs parts, the last smaller.

    ONNX Split-18.
    """
    if split is not None:
        return split_by_sizes(x, split.tolist(), axis)
    count, length = outputs if num_outputs is None else num_outputs, x.shape[axis]
    if count > max(length, outputs):
        raise OperatorError(f"num_outputs {count}", f"at most {max(length, outputs)}")
    part = -(-length // count)
    return split_by_sizes(x, [max(min(part, length - i * part), 0) for i in range(count)], axis)


@op("Slice-10", integer_range=same_range)
def slice_(x, starts: HostArray, ends: HostArray, axes: HostArray = None, steps: HostArray = None):
    """x[start:end:step] along each of axes (the first ones by default), as NumPy's; int64 [r] each.

    ONNX Slice-10, 11, 13.
    """
    places = [slice(None)] * x.ndim
    count = starts.size
    axes_ = range(count) if axes is None else axes.tolist()
    steps_ = [1] * count if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes_, steps_, strict=True):
        # Brings INT64_MAX and the like into the 32 bits that MLX takes; an end below 0 is then "to the beginning".
        size = x.shape[axis]
        start, end, step = slice(start, end, min(max(step, -size - 1), size + 1)).indices(size)
        places[axis] = slice(start, end if end >= 0 else None, step)
        if len(range(start, end, step)) == 0:
            places[axis] = slice(0, 0)
    return x[tuple(places)]


@op("Pad-11")
def pad(x, pads: HostArray, value=None, axes: HostArray = None, *, mode="constant"):
    """x with elements added (or, where negative, taken away) before and after each of axes (all by default).

    pads int64 [2 * r]: the r counts before, then the r after; value a scalar; mode "constant", "reflect", "edge" or
    "wrap", as NumPy's. ONNX Pad-11, 13, 18, 19, 21, 23, 24, 25.
    """
    axes_ = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes.tolist()]
    before, after = pads[: len(axes_)].tolist(), pads[len(axes_) :].tolist()
    places = [slice(None)] * x.ndim
    widths = [(0, 0)] * x.ndim
    for axis, low, high in zip(axes_, before, after, strict=True):
        places[axis] = slice(max(-low, 0), x.shape[axis] - max(-high, 0))
        widths[axis] = (max(low, 0), max(high, 0))
    x = x[tuple(places)]
    if not any(low or high for low, high in widths):
        return x
    if mode == "constant":
        return mx.pad(x, widths, constant_values=mx.zeros((), x.dtype) if value is None else value.reshape(()))
    if mode not in ("reflect", "edge", "wrap"):
        raise OperatorError(f"the mode {mode!r}", "constant, reflect, edge or wrap")
    for axis, width in enumerate(widths):
        if any(width):
            x = take(x, np.pad(np.arange(x.shape[axis]), width, mode=mode), axis)
    return x


@op("Trilu-14")
def trilu(x, k: HostArray = None, *, upper=1):
    """x [..., rows, columns] on and above its k-th diagonal (below with upper=0), 0 elsewhere. ONNX Trilu-14."""
    # A diagonal far outside is clamped, so that the int64 extremes exporters write do not overflow.
    rows, columns = x.shape[-2:]
    diagonal = 0 if k is None else min(max(int(k.item()), -rows - 1), columns + 1)
    lower = np.tri(rows, columns, diagonal - 1 if upper else diagonal, dtype=bool)
    return mx.where(mx.array(~lower if upper else lower), x, mx.zeros((), x.dtype))
