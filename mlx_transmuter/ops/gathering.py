"""Elements by index: gathers, scatters. An index below 0 counts from the end; one out of range is the caller's error."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import OperatorError, op


def _wrapped(indices: mx.array, size: int) -> mx.array:
    return mx.where(indices < 0, indices + size, indices)


@op("Gather-1")
def gather(x, indices, *, axis=0):
    """The parts of x at indices, integers [...], along `axis`, which [...] replaces. ONNX Gather-1, 11, 13."""
    return mx.take(x, indices, axis=axis)


@op("GatherElements-11")
def gather_elements(x, indices, *, axis=0):
    """x's element at the same place but for `axis`, where indices says it: as indices. ONNX GatherElements-11, 13."""
    axis = axis % x.ndim
    x = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))]
    return mx.take_along_axis(x, indices, axis=axis)


def _flat_indices(indices: mx.array, sizes: tuple[int, ...]) -> mx.array:
    """indices [..., k] into the first k of the axes `sizes`, as [...] into their product."""
    flat = mx.zeros(indices.shape[:-1], mx.int32)
    for i in range(indices.shape[-1]):
        flat = flat * sizes[i] + _wrapped(indices[..., i].astype(mx.int32), sizes[i])
    return flat


@op("GatherND-11")
def gather_nd(x, indices, *, batch_dims=0):
    """The parts of x at indices [..., k], each naming a place in k axes after the batch_dims first. ONNX GatherND-11, 12, 13."""
    b, k = batch_dims, indices.shape[-1]
    batch, picked, rest = x.shape[:b], x.shape[b : b + k], x.shape[b + k :]
    flat = _flat_indices(indices, picked)
    if b:
        offsets = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, *[1] * (flat.ndim - b))
        flat = flat + mx.array(offsets * math.prod(picked))
    parts = mx.take(x.reshape(math.prod(batch) * math.prod(picked), math.prod(rest)), flat.reshape(-1), axis=0)
    return parts.reshape(*indices.shape[:-1], *rest)


def _scatter(rows: mx.array, indices: mx.array, updates: mx.array, reduction: str) -> mx.array:
    """rows [n, d] with updates [m, d] at indices [m], combined with what is there."""
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
def scatter_nd(x, indices, updates, *, reduction="none"):
    """x with updates at indices [..., k], each naming a place in the first k axes. ONNX ScatterND-11, 13, 16, 18.

    updates [..., *the other axes of x]; reduction none, add, mul, max or min with what stands there.
    """
    if updates.size == 0 or x.size == 0:
        return x
    k = indices.shape[-1]
    width = math.prod(x.shape[k:])
    flat = _flat_indices(indices, x.shape[:k]).reshape(-1)
    return _scatter(x.reshape(-1, width), flat, updates.reshape(-1, width), reduction).reshape(x.shape)


@op("ScatterElements-11")
def scatter_elements(x, indices, updates, *, axis=0, reduction="none"):
    """x with each of updates at its own place but for `axis`, where indices says it. ONNX ScatterElements-11, 13, 16, 18."""
    if updates.size == 0:
        return x
    axis = axis % x.ndim
    strides = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    flat = _wrapped(indices.astype(mx.int32), x.shape[axis]) * strides[axis]
    for i, n in enumerate(indices.shape):
        if i != axis:
            flat = flat + (mx.arange(n) * strides[i]).reshape([n if j == i else 1 for j in range(x.ndim)])
    return _scatter(x.reshape(-1, 1), flat.reshape(-1), updates.reshape(-1, 1), reduction).reshape(x.shape)
