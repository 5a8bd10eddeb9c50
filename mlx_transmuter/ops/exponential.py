"""Exponentials for the CPU, where MLX has vector code for them on Apple silicon alone.

Elsewhere `mx.exp`, and with it `mx.softmax` and `mx.sigmoid`, takes 12 ns an element: it calls the C library for each
of its fused multiplications. Sums and products in a compiled step are vector code everywhere, so `exp` is written in
them: 2 ns an element, and off by 1.3 units in the last place where `mx.exp` is off by up to 64. It takes four kernels
in place of one, so short arrays keep MLX's own.
"""

import sys
from collections.abc import Callable

import mlx.core as mx

# From so many elements on, the kernels that it takes more cost less than what it saves.
FEWEST = 4096

_LOG2_E = 1.44269504
# ln 2 in two parts, the first of few bits, so that its product with an integer is exact. Cody & Waite 1980.
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4
# Beyond these nothing changes: the result is 0 below -87, so that none is subnormal, and infinite above 88.73.
_LOWEST, _HIGHEST = -87.3, 89.0


def exp(x: mx.array) -> mx.array:
    """eˣ, in x's type; 0 for float32 below -87 where it isn't MLX's own."""
    return _exp(x) if _is_faster(x) else mx.exp(x)


def softmax_parts(x: mx.array) -> tuple[mx.array, mx.array | None]:
    """(weights, sums): weights / sums, or weights alone where sums is None, is the softmax of x over its last axis.

    A product with values is divided by the sums, [..., 1], after it, where there is less to divide.
    """
    if not _is_faster(x):
        return mx.softmax(x, axis=-1, precise=True), None
    weights = _exp(x - mx.max(x, axis=-1, keepdims=True))
    return weights, mx.sum(weights, axis=-1, keepdims=True)


def sigmoid_times(x: mx.array, by: mx.array) -> mx.array:
    """by · sigmoid(x) = by / (1 + e⁻ˣ)."""
    if x.dtype != mx.float32:
        return by * mx.sigmoid(x)
    # Of an infinite e⁻ˣ the gradient would be infinity times 0.
    return by / (1 + exp(mx.minimum(-x, 88)))


def _is_faster(x: mx.array) -> bool:
    slow = mx.default_device() == mx.cpu and sys.platform != "darwin"
    return slow and x.dtype == mx.float32 and x.size >= FEWEST


@mx.custom_function
def _powers(x: mx.array) -> mx.array:
    """eˣ = 2ⁿ · eʳ, n the integer next to x / ln 2. float32."""
    x = mx.where(x < _LOWEST, _LOWEST, mx.where(x > _HIGHEST, _HIGHEST, x))
    above = (x * _LOG2_E + 126.5).astype(mx.int32)  # n + 126, which is not negative, so that it is rounded down
    n = above.astype(mx.float32) - 126
    r = (x - n * _LN2) - n * _LN2_REST
    # 2 · Taylor's series of eʳ, in pairs, which few kernels hold: for |r| ≤ ln 2 / 2 it ends below half a unit.
    square = r * r
    twice = (2 / 5040 * r + 2 / 720) * square + (2 / 120 * r + 2 / 24)
    twice = (twice * square + (2 / 6 * r + 1)) * square + (2 * r + 2)
    # 2ⁿ⁻¹ by its bits: 2¹²⁸, of the largest results, has none.
    return twice * mx.left_shift(above, 23).view(mx.float32)


@_powers.vjp
def _powers_vjp(x: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    return cotangent * result


_exp: Callable[[mx.array], mx.array] = mx.compile(_powers)  # type: ignore[assignment]
