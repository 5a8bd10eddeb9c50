"""Elements by index: gathers, scatters. An index below 0 counts from the end; see functional/indexing.py for those out
of range."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import (
    axis_shape,
    clip_indices,
    index_array,
    indexed_rows,
    put_along_axis,
    take,
    take_along_axis,
    wrap_indices,
)
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.integer_ranges import same_range
from mlx_transmuter.ops.registry import HostArray, OperatorError, op

# An index into a flattened array is an int32.
MAX_FLAT_SIZE = 2**31 - 1


@op("Gather-1", integer_range=same_range)
def gather(x, indices: Indices, *, axis=0):
    """The parts of x at indices, integers [...], along `axis`, which [...] replaces. ONNX Gather-1, 11, 13."""
    return take(x, indices, axis)


@op("GatherElements-11", integer_range=same_range)
def gather_elements(x, indices: Indices, *, axis=0):
    """x's element at the same place but for `axis`, where indices says it: as indices. ONNX GatherElements-11, 13."""
    axis = axis % x.ndim
    x = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))]
    return take_along_axis(x, indices, axis)


def _flatten_nd_indices(indices: Indices, sizes: tuple[int, ...]) -> mx.array:
    """Returns indices [..., k] into k axes of the sizes `sizes` as indices [...] into their flattened product.

    Raises OperatorError for more axes than there are.
    """
    if indices.shape[-1] > len(sizes):
        raise OperatorError(f"indices {list(indices.shape)} into {len(sizes)} axes", "an index for each axis, or fewer")
    flat = mx.zeros(indices.shape[:-1], mx.int32)
    for i in range(indices.shape[-1]):
        flat = flat * sizes[i] + wrap_indices(indices.on_last_axis(i), sizes[i]).astype(mx.int32)
    return flat


def _check_flat_size(x: mx.array) -> None:
    """Raises OperatorError for an array with more elements than an int32 counts."""
    if x.size > MAX_FLAT_SIZE:
        raise OperatorError(f"an array of shape {list(x.shape)}", f"at most {MAX_FLAT_SIZE} elements")


@op("GatherND-11", integer_range=same_range)
def gather_nd(x, indices: Indices, *, batch_dims=0):
    """The parts of x at indices [..., k], each naming a place in k axes after the batch_dims first.

    ONNX GatherND-11, 12, 13.
    """
    _check_flat_size(x)
    indices = Indices.of(indices)
    b, k = batch_dims, indices.shape[-1]
    batch, picked, rest = x.shape[:b], x.shape[b : b + k], x.shape[b + k :]
    flat = _flatten_nd_indices(indices, picked)
    if b:
        offsets = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, *[1] * (flat.ndim - b))
        flat = flat + mx.array(offsets * math.prod(picked))
    count = math.prod(batch) * math.prod(picked)
    parts = take(x.reshape(count, math.prod(rest)), Indices.between(flat.reshape(-1), 0, count - 1))
    return parts.reshape([*indices.shape[:-1], *rest])


def _scatter_rows(rows: mx.array, indices: mx.array, updates: mx.array, reduction: str) -> mx.array:
    """Returns rows [n, d] with updates [m, d] at indices [m], from 0 to n - 1, combined with the old rows by
    `reduction`.
    """
    if reduction == "none":
        places = mx.broadcast_to(indices[:, None], updates.shape)
        return put_along_axis(rows, Indices.between(places, 0, rows.shape[0] - 1), updates, axis=0)
    at = indexed_rows(rows, Indices.between(indices, 0, rows.shape[0] - 1))
    if reduction == "add":
        return at.add(updates)
    if reduction == "mul":
        return at.multiply(updates)
    if reduction == "max":
        return at.maximum(updates)
    if reduction == "min":
        return at.minimum(updates)
    raise OperatorError(f"the reduction {reduction!r}", "none, add, mul, max or min")


@op("ScatterND-11")
def scatter_nd(x, indices: Indices, updates, *, reduction="none"):
    """x with updates at indices [..., k], each naming a place in the first k axes. ONNX ScatterND-11, 13, 16, 18.

    updates [..., *the other axes of x]; reduction none, add, mul, max or min with the old element.
    """
    if updates.size == 0 or x.size == 0:
        return x
    _check_flat_size(x)
    indices = Indices.of(indices)
    k = indices.shape[-1]
    width = math.prod(x.shape[k:])
    flat = _flatten_nd_indices(indices, x.shape[:k]).reshape(-1)
    return _scatter_rows(x.reshape(-1, width), flat, updates.reshape(-1, width), reduction).reshape(x.shape)


@op("ScatterElements-11")
def scatter_elements(x, indices: Indices, updates, *, axis=0, reduction="none"):
    """x with each of updates at its own place but for `axis`, where indices says it.

    ONNX ScatterElements-11, 13, 16, 18.
    """
    if updates.size == 0:
        return x
    _check_flat_size(x)
    indices = Indices.of(indices)
    axis = axis % x.ndim
    others = [n for i, n in enumerate(x.shape) if i != axis]
    if indices.ndim != x.ndim or any(
        n > size for n, size in zip((n for i, n in enumerate(indices.shape) if i != axis), others, strict=True)
    ):
        found = f"indices {list(indices.shape)} into {list(x.shape)}"
        raise OperatorError(found, f"as many axes, none but {axis} longer than x's")
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    flat = wrap_indices(indices, x.shape[axis]).astype(mx.int32) * strides[axis]
    for i, n in enumerate(indices.shape):
        if i != axis:
            flat = flat + (mx.arange(n) * strides[i]).reshape(axis_shape(i, x.ndim, n))
    return _scatter_rows(x.reshape(-1, 1), flat.reshape(-1), updates.reshape(-1, 1), reduction).reshape(x.shape)


@op("Scatter-9")
def scatter(x, indices: Indices, updates, *, axis=0):
    """ScatterElements by its older name. ONNX Scatter-9."""
    return scatter_elements(x, indices, updates, axis=axis)


@op("TensorScatter-24")
def tensor_scatter(x, updates, write_indices: Indices = None, *, axis=-2, mode="linear"):
    """x [batch, ..., capacity, ...] with updates [batch, ..., n, ...] from write_indices [batch] on along `axis`.

    mode "linear", or "circular" where places wrap around. ONNX TensorScatter-24.
    """
    if mode not in ("linear", "circular"):
        raise OperatorError(f"the mode {mode!r}", "linear or circular")
    axis = axis % x.ndim
    capacity, count = x.shape[axis], updates.shape[axis]
    if not updates.size:
        return x
    if count > capacity:
        raise OperatorError(f"{count} updates on axis {axis} of {list(x.shape)}", f"at most {capacity}")
    places = mx.arange(count)[None]
    if write_indices is not None:
        if mode == "circular":
            first = index_array(write_indices).astype(mx.int32) % capacity
        else:
            first = clip_indices(write_indices, 0, capacity - count).astype(mx.int32)
        places = places + first[:, None]
    if mode == "circular":
        places = places % capacity
    shape = axis_shape(axis, x.ndim, places.shape[1])
    shape[0] = places.shape[0]
    places = mx.broadcast_to(places.reshape(shape), updates.shape)
    return put_along_axis(x, Indices.between(places, 0, capacity - 1), updates, axis=axis)


@op("Compress-9")
def compress(x, condition: HostArray, *, axis=None):
    """The parts of x along `axis` (of the flattened x if None) where condition, bool [n], is true.

    ONNX Compress-9, 11, 28.
    """
    return take(x.reshape(-1) if axis is None else x, np.flatnonzero(condition), 0 if axis is None else axis)


@op("ReverseSequence-10")
def reverse_sequence(x, sequence_lens: Indices, *, batch_axis=1, time_axis=0):
    """x with the first sequence_lens[b] steps of each row b in reverse order. ONNX ReverseSequence-10, 28."""
    count = x.shape[time_axis]
    steps = mx.arange(count).reshape(axis_shape(time_axis, x.ndim))
    lengths = clip_indices(sequence_lens, 0, count).astype(mx.int32).reshape(axis_shape(batch_axis, x.ndim))
    places = mx.broadcast_to(mx.where(steps < lengths, lengths - 1 - steps, steps), x.shape)
    return take_along_axis(x, Indices.between(places, 0, count - 1), axis=time_axis)
