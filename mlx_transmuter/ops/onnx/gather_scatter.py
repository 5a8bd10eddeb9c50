"""Elements by index: gathers, scatters. An index below 0 counts from the end; one out of range is undefined."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import axis_shape, checked_indices, wrap_negative_indices
from mlx_transmuter.ops.registry import HostArray, HostArrayIfKnown, OperatorError, op


@op("Gather-1")
def gather(x, indices: HostArrayIfKnown, *, axis=0):
    """The parts of x at indices, integers [...], along `axis`, which [...] replaces. ONNX Gather-1, 11, 13."""
    return mx.take(x, checked_indices(indices, x.shape[axis]), axis=axis)


@op("GatherElements-11")
def gather_elements(x, indices: HostArrayIfKnown, *, axis=0):
    """x's element at the same place but for `axis`, where indices says it: as indices. ONNX GatherElements-11, 13."""
    axis = axis % x.ndim
    x = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))]
    return mx.take_along_axis(x, checked_indices(indices, x.shape[axis]), axis=axis)


def _flatten_nd_indices(indices: mx.array | np.ndarray, sizes: tuple[int, ...]) -> mx.array:
    """Returns indices [..., k] into k axes of the sizes `sizes` as indices [...] into their flattened product."""
    flat = mx.zeros(indices.shape[:-1], mx.int32)
    for i in range(indices.shape[-1]):
        flat = flat * sizes[i] + wrap_negative_indices(
            checked_indices(indices[..., i], sizes[i]).astype(mx.int32), sizes[i]
        )
    return flat


@op("GatherND-11")
def gather_nd(x, indices: HostArrayIfKnown, *, batch_dims=0):
    """The parts of x at indices [..., k], each naming a place in k axes after the batch_dims first.

    ONNX GatherND-11, 12, 13.
    """
    b, k = batch_dims, indices.shape[-1]
    batch, picked, rest = x.shape[:b], x.shape[b : b + k], x.shape[b + k :]
    flat = _flatten_nd_indices(indices, picked)
    if b:
        offsets = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, *[1] * (flat.ndim - b))
        flat = flat + mx.array(offsets * math.prod(picked))
    parts = mx.take(x.reshape(math.prod(batch) * math.prod(picked), math.prod(rest)), flat.reshape(-1), axis=0)
    return parts.reshape([*indices.shape[:-1], *rest])


def _scatter_rows(rows: mx.array, indices: mx.array, updates: mx.array, reduction: str) -> mx.array:
    """Returns rows [n, d] with updates [m, d] at indices [m], combined with the old rows by `reduction`."""
    if reduction == "none":
        return mx.put_along_axis(rows, mx.broadcast_to(indices[:, None], updates.shape), updates, axis=0)
    at = rows.at[indices]
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
def scatter_nd(x, indices: HostArrayIfKnown, updates, *, reduction="none"):
    """x with updates at indices [..., k], each naming a place in the first k axes. ONNX ScatterND-11, 13, 16, 18.

    updates [..., *the other axes of x]; reduction none, add, mul, max or min with the old element.
    """
    if updates.size == 0 or x.size == 0:
        return x
    k = indices.shape[-1]
    width = math.prod(x.shape[k:])
    flat = _flatten_nd_indices(indices, x.shape[:k]).reshape(-1)
    return _scatter_rows(x.reshape(-1, width), flat, updates.reshape(-1, width), reduction).reshape(x.shape)


@op("ScatterElements-11")
def scatter_elements(x, indices: HostArrayIfKnown, updates, *, axis=0, reduction="none"):
    """x with each of updates at its own place but for `axis`, where indices says it.

    ONNX ScatterElements-11, 13, 16, 18.
    """
    if updates.size == 0:
        return x
    axis = axis % x.ndim
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    flat = (
        wrap_negative_indices(checked_indices(indices, x.shape[axis]).astype(mx.int32), x.shape[axis]) * strides[axis]
    )
    for i, n in enumerate(indices.shape):
        if i != axis:
            flat = flat + (mx.arange(n) * strides[i]).reshape(axis_shape(i, x.ndim, n))
    return _scatter_rows(x.reshape(-1, 1), flat.reshape(-1), updates.reshape(-1, 1), reduction).reshape(x.shape)


@op("Scatter-9")
def scatter(x, indices: HostArrayIfKnown, updates, *, axis=0):
    """ScatterElements by its older name. ONNX Scatter-9."""
    return scatter_elements(x, indices, updates, axis=axis)


@op("TensorScatter-24")
def tensor_scatter(x, updates, write_indices=None, *, axis=-2, mode="linear"):
    """x [batch, ..., capacity, ...] with updates [batch, ..., n, ...] from write_indices [batch] on along `axis`.

    mode "linear", or "circular" where places wrap around. ONNX TensorScatter-24.
    """
    if mode not in ("linear", "circular"):
        raise OperatorError(f"the mode {mode!r}", "linear or circular")
    axis = axis % x.ndim
    places = mx.arange(updates.shape[axis])[None]
    if write_indices is not None:
        places = places + write_indices.astype(mx.int32)[:, None]
    if mode == "circular":
        places = places % x.shape[axis]
    shape = axis_shape(axis, x.ndim, places.shape[1])
    shape[0] = places.shape[0]
    places = places.reshape(shape)
    return mx.put_along_axis(x, mx.broadcast_to(places, updates.shape), updates, axis=axis)


@op("Compress-9")
def compress(x, condition: HostArray, *, axis=None):
    """The parts of x along `axis` (of the flattened x if None) where condition, bool [n], is true.

    ONNX Compress-9, 11, 28.
    """
    places = mx.array(np.flatnonzero(condition).astype(np.int32))
    return mx.take(x.reshape(-1) if axis is None else x, places, axis=0 if axis is None else axis)


@op("ReverseSequence-10")
def reverse_sequence(x, sequence_lens, *, batch_axis=1, time_axis=0):
    """x with the first sequence_lens[b] steps of each row b in reverse order. ONNX ReverseSequence-10, 28."""
    steps = mx.arange(x.shape[time_axis]).reshape(axis_shape(time_axis, x.ndim))
    lengths = sequence_lens.astype(mx.int32).reshape(axis_shape(batch_axis, x.ndim))
    places = mx.where(steps < lengths, lengths - 1 - steps, steps)
    return mx.take_along_axis(x, mx.broadcast_to(places, x.shape), axis=time_axis)
