"""Exponentials for the CPU, where MLX has vector code for them on Apple silicon alone.

Elsewhere `mx.exp`, and with it `mx.softmax` and `mx.sigmoid`, takes 12 ns an element: it calls the C library for each
of its fused multiplications. Sums and products in a compiled step are vector code everywhere, so `exp` is written in
them: 1.3 ns an element, and off by 1 unit in the last place where `mx.exp` is off by up to 64. It takes some operations
in place of one, so short arrays keep MLX's own.
"""

import math
import sys
from collections.abc import Callable

import mlx.core as mx

# From so many elements on, the operations that it takes more cost less than what it saves.
MIN_ELEMENTS = 2048
# From so many on, so do the two steps of a reduction, the first of which leaves this many parts of a row one.
_MIN_TWO_STEP_ELEMENTS, _ROW_PARTS = 16384, 16

# The bits of 2ⁿ are n + 127 of these.
_EXPONENT_UNIT = 2.0**23
# ln 2 in two parts, the first of few bits, so that its product with an integer is exact. Cody & Waite 1980.
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4
# Beyond these nothing changes: the result is 0 below -87, so that none is subnormal, and infinite above 88.73.
_LOWEST, _HIGHEST = -87.3, 89.0
# (eʳ - 1 - r) / r² for |r| ≤ ln 2 / 2, of least relative error in eʳ: 3e-9, a twentieth of half a unit.
_EXP_POLYNOMIAL = 0.499999934, 0.1666652, 0.0416683958, 0.00836879668, 0.00138144332


def fast_exp(x: mx.array) -> mx.array:
    """eˣ, in x's type; 0 for float32 below -87 where it isn't MLX's own."""
    if not _uses_vector_exp(x):
        return mx.exp(x)
    # Constants first: MLX asks of its first operand whether it is NaN, element by element.
    x = mx.maximum(_LOWEST, mx.minimum(_HIGHEST, x))
    # No kernel goes on beyond an axis that comes and goes: this one has room for one level of operations more, and
    # constants that don't fit would become arrays, which are not read in vector code.
    return mx.expand_dims(_compiled_vector_exp(x), 0).squeeze(0)


def softmax_numerator_and_sum(x: mx.array) -> tuple[mx.array, mx.array | None]:
    """(weights, sums): weights / sums, or weights alone where sums is None, is the softmax of x over its last axis.

    A product with values is divided by the sums, [..., 1], after it, where there is less to divide.
    """
    if not _uses_vector_exp(x):
        return mx.softmax(x, axis=-1, precise=True), None
    weights = _compiled_vector_exp(mx.maximum(_LOWEST, x - _reduce_last_axis(mx.max, x)))
    return weights, _reduce_last_axis(mx.sum, weights)


def scaled_sigmoid(x: mx.array, factor: mx.array) -> mx.array:
    """by · sigmoid(x) = by / (1 + e⁻ˣ)."""
    if x.dtype != mx.float32:
        return factor * mx.sigmoid(x)
    # Of an infinite e⁻ˣ the gradient would be infinity times 0.
    return factor / (1 + fast_exp(mx.minimum(88, -x)))


def _uses_vector_exp(x: mx.array) -> bool:
    slow = mx.default_device() == mx.cpu and sys.platform != "darwin"
    return slow and x.dtype == mx.float32 and x.size >= MIN_ELEMENTS


def _reduce_last_axis(reduce: Callable[..., mx.array], x: mx.array) -> mx.array:
    """reduce(x) over its last axis, [..., 1]: of many elements, first the parts of each row to one, in vector code."""
    if x.size >= _MIN_TWO_STEP_ELEMENTS and x.shape[-1] % (8 * _ROW_PARTS) == 0:
        x = reduce(x.reshape(*x.shape[:-1], _ROW_PARTS, -1), axis=-2)
    return reduce(x, axis=-1, keepdims=True)


def _vector_exp(x: mx.array) -> mx.array:
    """eˣ = 2ⁿ · eʳ, n the integer next to x / ln 2. float32, between _LOWEST and _HIGHEST.

    One kernel makes 2ⁿ⁻¹ by its bits (2¹²⁸, of the largest results, has none) and one all else, from x and the bits:
    whatever else both used would be made by a third. Autodiff takes 2ⁿ for a constant and derives the polynomial.
    """
    whole = 1.5 * 2**23 * _EXPONENT_UNIT  # floats of this size are whole units, so that adding it rounds
    bits = (x * (math.log2(math.e) * _EXPONENT_UNIT) + whole) - (whole - 126 * _EXPONENT_UNIT)
    bits = mx.stop_gradient(bits.astype(mx.int32))
    units = bits.astype(mx.float32) - 126 * _EXPONENT_UNIT  # n of them
    r = (x - units * (_LN2 / _EXPONENT_UNIT)) - units * (_LN2_REST / _EXPONENT_UNIT)
    a, b, c, d, e = (2 * factor for factor in _EXP_POLYNOMIAL)
    square = r * r
    rest = (e * square + (d * r + c)) * square + (b * r + a)
    # MLX counts how deep a value is in a kernel from its last use: that of r is near the end.
    return ((rest * square + 2 * r) + 2) * bits.view(mx.float32)


_compiled_vector_exp: Callable[[mx.array], mx.array] = mx.compile(_vector_exp)  # type: ignore[assignment]
