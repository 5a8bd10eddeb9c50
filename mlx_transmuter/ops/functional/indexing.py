"""Reads and writes by index, all of which stay inside the array; and the shapes of vectors along an axis.

An index out of range becomes the nearest in range: MLX would read or write undefined memory, or end the process. An
operator that drops such elements masks them besides. Where the indices are known while a step is traced, one out of
range is an OperatorError instead; where their range is known to fit (see `Indices`), nothing is computed.
"""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError
from mlx_transmuter.ops.types import to_device

AnyIndices = Indices | mx.array | np.ndarray


def clip_indices(indices: AnyIndices, low: int, high: int) -> mx.array:
    """Returns the indices on the device, int32 (or uint32), each from low to high: one outside becomes the nearest.

    Raises OperatorError where they are known to be outside, or where low is above high, which leaves no index.
    """
    indices = Indices.of(indices)
    array, known = indices.array, indices.range
    if not array.size:
        return index_array(indices)
    if low > high:
        raise OperatorError(f"indices {list(array.shape)} into an axis without elements", "an axis with elements")
    on_device = index_array(indices)
    if known is not None and known.is_within(low, high):
        return on_device
    if known is not None and (isinstance(array, np.ndarray) or known.low > high or known.high < low):
        raise OperatorError(f"indices from {known.low} to {known.high}", f"indices from {low} to {high}")
    return _clip(on_device, low, high)


def _clip(array: mx.array, low: int, high: int) -> mx.array:
    """Returns the array, int32 or uint32, with what is outside low to high replaced by the nearest."""
    return mx.minimum(array, high) if array.dtype == mx.uint32 else mx.clip(array, low, high)


def index_array(indices: AnyIndices) -> mx.array:
    """Returns the indices as they are, on the device, as integers of 32 bits, which the bounds of any axis fit."""
    array = Indices.of(indices).array
    array = to_device(array) if isinstance(array, np.ndarray) else array
    return array if array.dtype in (mx.int32, mx.uint32) else array.astype(mx.int32)


def wrap_indices(indices: AnyIndices, size: int) -> mx.array:
    """Returns the indices into an axis of that size as indices from 0 to size - 1; those below 0 count from its end."""
    known = Indices.of(indices).range
    array = clip_indices(indices, -size, size - 1)
    if array.dtype == mx.uint32 or (known is not None and known.low >= 0):
        return array
    return mx.where(array < 0, array + size, array)


def take(x: mx.array, indices: AnyIndices, axis: int = 0) -> mx.array:
    """mx.take: the parts of x at the indices [...] along `axis`, which [...] replaces; from the end below 0."""
    size = x.shape[axis]
    return mx.take(x, clip_indices(indices, -size, size - 1), axis=axis)


def take_rows(table: mx.array, numbers: AnyIndices) -> mx.array:
    """Returns the rows of a table [rows, ...] of these numbers [...], of which none counts from the end: [..., ...]."""
    return mx.take(table, clip_indices(numbers, 0, table.shape[0] - 1), axis=0)


def take_along_axis(x: mx.array, indices: AnyIndices, axis: int) -> mx.array:
    """mx.take_along_axis: x's element at the same place but for `axis`, where the index says it; below 0 from its
    end.
    """
    size = x.shape[axis]
    return mx.take_along_axis(x, clip_indices(indices, -size, size - 1), axis=axis)


def put_along_axis(x: mx.array, indices: AnyIndices, values: mx.array, axis: int) -> mx.array:
    """mx.put_along_axis: x with each of values at its own place but for `axis`, where the index says it; from the end
    below 0.
    """
    size = x.shape[axis]
    return mx.put_along_axis(x, clip_indices(indices, -size, size - 1), values, axis=axis)


def indexed_rows(x: mx.array, indices: AnyIndices):
    """Returns x.at[indices], the rows that its `add`, `multiply`, … update; from the end below 0."""
    size = x.shape[0]
    return x.at[clip_indices(indices, -size, size - 1)]


def update_slice(x: mx.array, values: mx.array, start: AnyIndices, axis: int) -> mx.array:
    """mx.slice_update: x with values, as large on all other axes, from start [1] on along `axis`; a start from which
    they do not fit is the last from which they do.
    """
    last = x.shape[axis] - values.shape[axis]
    return mx.slice_update(x, values, clip_indices(start, 0, last), axes=(axis,))


def element(x: mx.array, index: int, axis: int = 0) -> mx.array:
    """Returns x at the index, known now, of `axis`, without that axis.

    Raises OperatorError for an index out of range: x[index] of an mx.array would read undefined memory.
    """
    size = x.shape[axis]
    if not -size <= index < size:
        raise OperatorError(f"an array of shape {list(x.shape)}", f"at least {max(index + 1, -index)} on axis {axis}")
    return x[(slice(None),) * (axis % x.ndim) + (index,)]


def axis_shape(axis: int, rank: int, size: int = -1) -> list[int]:
    """Returns the shape by which a vector lies along `axis` of an array of that rank: `size` there, 1 elsewhere."""
    return [size if i == axis % rank else 1 for i in range(rank)]
