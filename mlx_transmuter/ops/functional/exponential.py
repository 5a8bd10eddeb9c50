"""Exponentials in vector code for CPUs other than Apple silicon, where MLX has none.

There `mx.exp`, and with it `mx.softmax` and `mx.sigmoid`, takes 12 ns per element, as it calls the C library for each
fused multiplication. Sums and products of a compiled step are vector code on every CPU, so `fast_exp` consists of them:
1.3 ns per element, with an error of 1 unit in the last place where that of `mx.exp` reaches 64. It is several
operations instead of one, so short arrays use MLX's own.
"""

import math
import sys
from collections.abc import Callable

import mlx.core as mx

from mlx_transmuter.ops.compiled_function import CompiledFunction

# The fewest elements for which fast_exp saves more than its additional operations cost.
MIN_ELEMENTS = 2048
# The fewest elements for which a reduction in two steps is faster, and the parts of a row that its first step leaves.
_MIN_TWO_STEP_ELEMENTS, _ROW_PARTS = 16384, 16

# The bits of 2ⁿ as a float32 are (n + 127) times this.
_EXPONENT_UNIT = 2.0**23
# ln 2 as a sum, whose first term has few bits, so that its product with an integer is exact. Cody & Waite 1980.
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4
# Arguments are clipped to these: the result is 0 below -87.3, so that none is subnormal, and infinite above 88.73.
_LOWEST, _HIGHEST = -87.3, 89.0
# Coefficients of (eʳ - 1 - r) / r² for |r| ≤ ln 2 / 2, with a relative error in eʳ of 3e-9, 1/20 of half a unit.
_EXP_POLYNOMIAL = 0.499999934, 0.1666652, 0.0416683958, 0.00836879668, 0.00138144332


def fast_exp(x: mx.array) -> mx.array:
    """Returns eˣ in x's type; of float32 below -87 it is 0 unless MLX's own exponential is used."""
    if not _uses_vector_exp(x):
        return mx.exp(x)
    # The constants are first, as MLX's minimum and maximum test the first operand for NaN, element by element.
    x = mx.maximum(_LOWEST, mx.minimum(_HIGHEST, x))
    # The added and removed axis ends the compiled kernel here. Merged with more operations, it would reach MLX's limit
    # of depth, and constants beyond it would become arrays, which are not read in vector code.
    return mx.expand_dims(_compiled_vector_exp(x), 0).squeeze(0)


def softmax_numerator_and_sum(x: mx.array) -> tuple[mx.array, mx.array | None]:
    """Returns (weights, sums): weights / sums, or weights where sums is None, is the softmax over x's last axis.

    sums: [..., 1]. A product of the weights with values is divided by them after it, when there is less to divide.
    """
    if not _uses_vector_exp(x):
        return mx.softmax(x, axis=-1, precise=True), None
    weights = _compiled_vector_exp(mx.maximum(_LOWEST, x - reduce_last_axis(mx.max, x)))
    return weights, reduce_last_axis(mx.sum, weights)


def scaled_sigmoid(x: mx.array, factor: mx.array) -> mx.array:
    """Returns factor · sigmoid(x) = factor / (1 + e⁻ˣ)."""
    if x.dtype != mx.float32:
        return factor * mx.sigmoid(x)
    # For an infinite e⁻ˣ the gradient would be infinity times 0.
    return factor / (1 + fast_exp(mx.minimum(88, -x)))


def _uses_vector_exp(x: mx.array) -> bool:
    mlx_has_vector_code = mx.default_device() != mx.cpu or sys.platform == "darwin"
    return not mlx_has_vector_code and x.dtype == mx.float32 and x.size >= MIN_ELEMENTS


def reduce_last_axis(reduce: Callable[..., mx.array], x: mx.array) -> mx.array:
    """Returns reduce(x) over the last axis, [..., 1]; long rows are first reduced to _ROW_PARTS parts each."""
    if x.size >= _MIN_TWO_STEP_ELEMENTS and x.shape[-1] % (8 * _ROW_PARTS) == 0:
        x = reduce(x.reshape(*x.shape[:-1], _ROW_PARTS, -1), axis=-2)
    return reduce(x, axis=-1, keepdims=True)


def _vector_exp(x: mx.array) -> mx.array:
    """Returns eˣ = 2ⁿ · eʳ, where n is the integer nearest to x / ln 2; float32 x between _LOWEST and _HIGHEST.

    One kernel computes 2ⁿ⁻¹ as bits (2¹²⁸, of the largest results, is no float32), and one the rest, from x and the
    bits: any other value that both used would need a third kernel. Autodiff takes 2ⁿ as a constant and differentiates
    the polynomial.
    """
    rounder = 1.5 * 2**23 * _EXPONENT_UNIT  # a float of this size is a multiple of the unit, so adding it rounds
    bits = (x * (math.log2(math.e) * _EXPONENT_UNIT) + rounder) - (rounder - 126 * _EXPONENT_UNIT)
    bits = mx.stop_gradient(bits.astype(mx.int32))
    units = bits.astype(mx.float32) - 126 * _EXPONENT_UNIT  # n · _EXPONENT_UNIT
    r = (x - units * (_LN2 / _EXPONENT_UNIT)) - units * (_LN2_REST / _EXPONENT_UNIT)
    a, b, c, d, e = (2 * factor for factor in _EXP_POLYNOMIAL)
    square = r * r
    rest = (e * square + (d * r + c)) * square + (b * r + a)
    # MLX measures the depth of a value in a kernel from its last use, so r is last used near the end.
    return ((rest * square + 2 * r) + 2) * bits.view(mx.float32)


_compiled_vector_exp = CompiledFunction(_vector_exp)
