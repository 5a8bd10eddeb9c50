"""Arrays from nothing but a shape or a few numbers: constants, ranges, identities, one-hot rows."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import axis_shape, element
from mlx_transmuter.ops.integer_ranges import range_of_input
from mlx_transmuter.ops.onnx.casting import saturating_cast
from mlx_transmuter.ops.registry import HostArray, OperatorError, op
from mlx_transmuter.ops.types import device_dtype, to_device

# A range lies on the host, several times while it is made; no sequence, vocabulary or image has a longer axis.
MAX_RANGE_LENGTH = 2**24


@op("Constant-9")
def constant(
    *,
    value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    value_string=None,
    value_strings=None,
):
    """The value of the node's only attribute, on the host. ONNX Constant-9, 11, 12, 13, 19, 21, 23, 24, 25."""
    if value is not None:
        return value
    for number, dtype in (
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
        (value_string, np.str_),
        (value_strings, np.str_),
    ):
        if number is not None:
            return np.array(number, dtype)
    raise OperatorError("a constant without a value", "a dense value")


@op("ConstantOfShape-9")
def constant_of_shape(shape: HostArray, *, value=None):
    """An array of that shape, filled with the one element of value (float32 0 by default).

    ONNX ConstantOfShape-9 to 25.
    """
    filling = mx.array(0.0) if value is None else to_device(value).reshape(())
    return mx.full(tuple(shape.tolist()), filling, filling.dtype)


@op("Range-11")
def range_(start: HostArray, limit: HostArray, delta: HostArray, *, stash_type=1):
    """start, start + delta, ... before limit: a host value of the type of start. ONNX Range-11, 27."""
    count = max(int(np.ceil((limit.item() - start.item()) / delta.item())), 0)
    if count > MAX_RANGE_LENGTH:
        raise OperatorError(f"a range of {count} numbers", f"at most {MAX_RANGE_LENGTH}")
    return (start.item() + np.arange(count) * delta.item()).astype(start.dtype)


@op("EyeLike-9")
def eye_like(x, *, dtype=None, k=0):
    """Ones on the k-th diagonal, zeros elsewhere, [rows, columns] of x, of the ONNX type `dtype` or x's.

    ONNX EyeLike-9, 22.
    """
    return mx.eye(*x.shape, k=k, dtype=x.dtype if dtype is None else device_dtype(dtype))


@op("OneHot-9", integer_range=range_of_input(2))
def one_hot(indices, depth: HostArray, values, *, axis=-1):
    """values[1] at the index, values[0] elsewhere, along a new axis of size depth; no index in range: all values[0].

    indices [...], an index i < 0 counts from the end; depth a scalar; values [2] = [off, on]. ONNX OneHot-9, 11, 28.
    """
    size, rank = int(depth.item()), indices.ndim + 1
    axis = axis % rank
    indices = mx.expand_dims(saturating_cast(indices, mx.int32), axis)
    indices = mx.where(indices < 0, indices + size, indices)  # compared alone: an index out of range meets no place
    places = mx.arange(size).reshape(axis_shape(axis, rank, size))
    return mx.where(indices == places, element(values, 1), element(values, 0))
