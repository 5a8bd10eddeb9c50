"""Comparison and logic, elementwise with NumPy's broadcasting; results are bool."""

import mlx.core as mx

from mlx_transmuter.ops.integer_ranges import range_of_inputs
from mlx_transmuter.ops.registry import op


@op("Equal-7")
def equal(a, b):
    """a == b. ONNX Equal-7, 11, 13, 19."""
    return a == b


@op("Greater-9")
def greater(a, b):
    """a > b. ONNX Greater-9, 13."""
    return a > b


@op("GreaterOrEqual-12")
def greater_or_equal(a, b):
    """a >= b. ONNX GreaterOrEqual-12, 16."""
    return a >= b


@op("Less-9")
def less(a, b):
    """a < b. ONNX Less-9, 13."""
    return a < b


@op("LessOrEqual-12")
def less_or_equal(a, b):
    """a <= b. ONNX LessOrEqual-12, 16."""
    return a <= b


@op("And-7")
def and_(a, b):
    """a and b, of bools. ONNX And-7."""
    return mx.logical_and(a, b)


@op("Or-7")
def or_(a, b):
    """a or b, of bools. ONNX Or-7."""
    return mx.logical_or(a, b)


@op("Xor-7")
def xor(a, b):
    """Whether just one of a and b, bools, is true. ONNX Xor-7."""
    return a != b


@op("Not-1")
def not_(x):
    """Not x, a bool. ONNX Not-1."""
    return mx.logical_not(x)


@op("IsNaN-9")
def is_nan(x):
    """Where x is not a number. ONNX IsNaN-9, 13, 20."""
    return mx.isnan(x)


@op("IsInf-10")
def is_inf(x, *, detect_negative=1, detect_positive=1):
    """Where x is infinite, of the signs that the attributes name. ONNX IsInf-10, 20."""
    if detect_negative and detect_positive:
        return mx.isinf(x)
    if detect_positive:
        return x == mx.inf
    return x == -mx.inf if detect_negative else mx.zeros(x.shape, mx.bool_)


@op("Where-9", integer_range=range_of_inputs(1))
def where(condition, a, b):
    """a where condition, a bool, is true, else b. ONNX Where-9, 16."""
    return mx.where(condition, a, b)
