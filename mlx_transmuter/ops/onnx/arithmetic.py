"""Arithmetic, elementwise with NumPy's broadcasting: sums, products, quotients, powers, extrema, rounding, bits."""

from functools import reduce

import mlx.core as mx

from mlx_transmuter.ops.integer_ranges import (
    range_of_clip,
    range_of_difference,
    range_of_maximum,
    range_of_minimum,
    range_of_product,
    range_of_remainder,
    range_of_sum,
)
from mlx_transmuter.ops.registry import OperatorError, op

_UNSIGNED_OF = {mx.int8: mx.uint8, mx.int16: mx.uint16, mx.int32: mx.uint32}


def _is_integer(x: mx.array) -> bool:
    return mx.issubdtype(x.dtype, mx.integer)


def _magnitude(x: mx.array) -> mx.array:
    """Returns |x| as an unsigned integer, which also represents that of the smallest value."""
    unsigned = _UNSIGNED_OF.get(x.dtype)
    return x if unsigned is None else mx.where(x < 0, -x, x).view(unsigned)


def _fmod(a: mx.array, b: mx.array) -> mx.array:
    """Returns the remainder with the sign of `a`, as C's fmod; from magnitudes, so that every backend rounds alike."""
    if _is_integer(a):
        remainder = mx.remainder(_magnitude(a), _magnitude(b)).astype(a.dtype)
        return mx.where(a < 0, -remainder, remainder)
    remainder = mx.remainder(mx.abs(a), mx.abs(b))
    return mx.where(mx.isinf(b) & mx.isfinite(a), a, mx.where(a < 0, -remainder, remainder))


@op("Add-7", integer_range=range_of_sum)
def add(a, b):
    """a + b. ONNX Add-7, 13, 14."""
    return a + b


@op("Sub-7", integer_range=range_of_difference)
def sub(a, b):
    """a - b. ONNX Sub-7, 13, 14."""
    return a - b


@op("Mul-7", integer_range=range_of_product)
def mul(a, b):
    """a * b. ONNX Mul-7, 13, 14."""
    return a * b


@op("Div-7")
def div(a, b):
    """a / b; of integers the quotient rounded toward zero. ONNX Div-7, 13, 14."""
    if not _is_integer(a):
        return a / b
    quotient = (_magnitude(a) // _magnitude(b)).astype(a.dtype)
    return mx.where((a < 0) != (b < 0), -quotient, quotient)


@op("Mod-10", integer_range=range_of_remainder)
def mod(a, b, *, fmod=0):
    """The remainder of a / b with the sign of b, or with fmod=1 that of a. ONNX Mod-10, 13, 28."""
    remainder = _fmod(a, b)
    if fmod:
        return remainder
    return mx.where((remainder != 0) & ((remainder < 0) != (b < 0)), remainder + b, remainder)


@op("Pow-7")
def pow_(base, exponent):
    """base to the power of exponent, in the type of base. ONNX Pow-7, 12, 13, 15."""
    return mx.power(base, exponent).astype(base.dtype)


@op("Sum-8")
def sum_(*xs):
    """The sum of the inputs. ONNX Sum-8, 13."""
    return reduce(mx.add, xs)


@op("Mean-8")
def mean(*xs):
    """The mean of the inputs. ONNX Mean-8, 13."""
    return reduce(mx.add, xs) / len(xs)


@op("Max-8", integer_range=range_of_maximum)
def max_(*xs):
    """The largest of the inputs; NaN where one is. ONNX Max-8, 12, 13."""
    return reduce(mx.maximum, xs)


@op("Min-8", integer_range=range_of_minimum)
def min_(*xs):
    """The smallest of the inputs; NaN where one is. ONNX Min-8, 12, 13."""
    return reduce(mx.minimum, xs)


@op("Clip-11", integer_range=range_of_clip)
def clip(x, low=None, high=None):
    """x within [low, high], scalars; high where low is above it. ONNX Clip-11, 12, 13."""
    x = x if low is None else mx.maximum(x, low)
    return x if high is None else mx.minimum(x, high)


@op("Neg-6")
def neg(x):
    """-x. ONNX Neg-6, 13."""
    return -x


@op("Abs-6")
def abs_(x):
    """|x|. ONNX Abs-6, 13."""
    return mx.abs(x)


@op("Sign-9")
def sign(x):
    """-1, 0 or 1; NaN stays. ONNX Sign-9, 13."""
    return mx.sign(x) if _is_integer(x) else mx.where(mx.isnan(x), x, mx.sign(x))


@op("Floor-6")
def floor(x):
    """x rounded down. ONNX Floor-6, 13."""
    return mx.floor(x)


@op("Ceil-6")
def ceil(x):
    """x rounded up. ONNX Ceil-6, 13."""
    return mx.ceil(x)


@op("Round-11")
def round_(x):
    """x rounded to the nearest integer, halves to the even one. ONNX Round-11, 22."""
    return mx.round(x)


@op("Sqrt-6")
def sqrt(x):
    """The square root of x. ONNX Sqrt-6, 13."""
    return mx.sqrt(x)


@op("Reciprocal-6")
def reciprocal(x):
    """1 / x. ONNX Reciprocal-6, 13."""
    return mx.reciprocal(x)


@op("BitShift-11")
def bit_shift(x, by, *, direction):
    """x shifted by as many bits to the "LEFT" or "RIGHT"; signed numbers keep their sign, other bits become 0.

    ONNX BitShift-11, 28.
    """
    if direction not in ("LEFT", "RIGHT"):
        raise OperatorError(f"the direction {direction!r}", "LEFT or RIGHT")
    bits = 8 * x.dtype.size
    within = (by >= 0) & (by < bits)
    by = mx.where(within, by, bits - 1).astype(x.dtype)
    if direction == "LEFT":
        return mx.where(within, mx.left_shift(x, by), mx.zeros_like(x))
    shifted = mx.right_shift(x, by)
    # By all its bits or more, a negative number shifted right becomes -1, any other number 0.
    return shifted if mx.issubdtype(x.dtype, mx.signedinteger) else mx.where(within, shifted, mx.zeros_like(x))


@op("BitwiseAnd-18")
def bitwise_and(a, b):
    """a & b, bit by bit. ONNX BitwiseAnd-18."""
    return a & b


@op("BitwiseOr-18")
def bitwise_or(a, b):
    """a | b, bit by bit. ONNX BitwiseOr-18."""
    return a | b


@op("BitwiseXor-18")
def bitwise_xor(a, b):
    """a ^ b, bit by bit. ONNX BitwiseXor-18."""
    return mx.bitwise_xor(a, b)


@op("BitwiseNot-18")
def bitwise_not(x):
    """~x, bit by bit. ONNX BitwiseNot-18."""
    return mx.bitwise_invert(x)
