"""Order and place: largest elements, sorting, running sums, and the places of elements."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import take_along_axis
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.integer_ranges import range_of_axis, range_of_elements_sum
from mlx_transmuter.ops.registry import HostArray, op


def _reverse_order(x: mx.array) -> mx.array:
    """Returns values ordered opposite to x, without the overflow of negating the smallest integer."""
    if x.dtype == mx.bool_:
        return mx.logical_not(x)
    return mx.bitwise_invert(x) if mx.issubdtype(x.dtype, mx.integer) else -x


@op("TopK-11", integer_range=range_of_axis(1))
def top_k(x, k: HostArray, *, axis=-1, largest=1, sorted=1):
    """The k largest (or smallest) elements along `axis` in order, and their indices, int64; equals by index.

    ONNX TopK-11, 24.
    """
    axis = axis % x.ndim
    order = mx.argsort(_reverse_order(x) if largest else x, axis=axis)
    order = order[tuple(slice(int(k.item())) if i == axis else slice(None) for i in range(x.ndim))].astype(mx.int32)
    return take_along_axis(x, Indices.between(order, 0, x.shape[axis] - 1), axis=axis), order


def _arg_extremum(find, x: mx.array, axis: int, keepdims: int, last: int) -> mx.array:
    if x.size == 0:
        axis = axis % x.ndim
        return mx.zeros([1 if i == axis else n for i, n in enumerate(x.shape) if keepdims or i != axis], mx.int32)
    if not last:
        return find(x, axis=axis, keepdims=bool(keepdims)).astype(mx.int32)
    backward = tuple(slice(None, None, -1) if i == axis % x.ndim else slice(None) for i in range(x.ndim))
    return x.shape[axis] - 1 - find(x[backward], axis=axis, keepdims=bool(keepdims)).astype(mx.int32)


@op("ArgMax-11", integer_range=range_of_axis(0))
def arg_max(x, *, axis=0, keepdims=1, select_last_index=0):
    """The index, int64, of the largest element along `axis`: the first of equals, or the last.

    ONNX ArgMax-11, 12, 13.
    """
    return _arg_extremum(mx.argmax, x, axis, keepdims, select_last_index)


@op("ArgMin-11", integer_range=range_of_axis(0))
def arg_min(x, *, axis=0, keepdims=1, select_last_index=0):
    """The index, int64, of the smallest element along `axis`: the first of equals, or the last.

    ONNX ArgMin-11, 12, 13.
    """
    return _arg_extremum(mx.argmin, x, axis, keepdims, select_last_index)


@op("CumSum-11", integer_range=range_of_elements_sum)
def cum_sum(x, axis: HostArray, *, exclusive=0, reverse=0):
    """The running sum along axis, a scalar; without the element itself, or from the end. ONNX CumSum-11, 14."""
    return mx.cumsum(x, axis=int(axis.item()), reverse=bool(reverse), inclusive=not exclusive)


@op("NonZero-9")
def non_zero(x: HostArray):
    """The places of x's elements other than 0, int64 [rank, count] on the host. ONNX NonZero-9, 13."""
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)


@op("CumProd-26")
def cum_prod(x, axis: HostArray, *, exclusive=0, reverse=0):
    """The running product along axis, a scalar; without the element itself, or from the end. ONNX CumProd-26."""
    return mx.cumprod(x, axis=int(axis.item()), reverse=bool(reverse), inclusive=not exclusive)


@op("Unique-11")
def unique(x: HostArray, *, axis=None, sorted=1, outputs=1):
    """The different elements of x, or parts along `axis`, then their first places, each one's class, and counts.

    In order, or by first place if not sorted; int64 on the host. ONNX Unique-11, 28.
    """
    y, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        rank = np.argsort(order)
        y, first, counts, inverse = np.take(y, order, axis=axis or 0), first[order], counts[order], rank[inverse]
    return (y, first.astype(np.int64), inverse.astype(np.int64), counts.astype(np.int64))[:outputs]
