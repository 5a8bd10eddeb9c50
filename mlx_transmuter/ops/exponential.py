"""Exponentials for the CPU, where MLX has vector code for them on Apple silicon alone.

Elsewhere `mx.exp`, and with it `mx.softmax` and `mx.sigmoid`, takes 12 ns an element: it calls the C library for each
of its fused multiplications. Sums and products in a compiled step are vector code everywhere, so `exp` is written in
them: 2 ns an element, and off by 1.2 units in the last place where `mx.exp` is off by 32. It takes three kernels in
place of one, so short arrays keep MLX's own.
"""

import sys

import mlx.core as mx

# From so many elements on, the kernels that it takes more cost less than what it saves.
FEWEST = 4096

# Added to a float32 and taken away again: the nearest integer, by the rounding of the sum (1.5 · 2²³).
_ROUND = 12582912.0
_LOG2_E = 1.44269504
# ln 2 in two parts, the first of few bits, so that its product with an integer is exact. Cody & Waite 1980.
_LN2, _LN2_REST = 0.693359375, -2.12194440e-4
# 2 · Taylor's series of eˣ, the highest power first: on |x| ≤ ln 2 / 2 its error is below half a unit.
_TWICE = (2 / 5040, 2 / 720, 2 / 120, 2 / 24, 2 / 6, 1.0, 2.0, 2.0)
# From here on nothing changes: the result is 0 below -87, so that none is subnormal, and infinite above 88.73.
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
    return by / (1 + exp(-x)) if x.dtype == mx.float32 else by * mx.sigmoid(x)


def _is_faster(x: mx.array) -> bool:
    slow = mx.default_device() == mx.cpu and sys.platform != "darwin"
    return slow and x.dtype == mx.float32 and x.size >= FEWEST


@mx.compile
def _exp(x: mx.array) -> mx.array:
    """eˣ = 2ⁿ · eʳ, n the integer next to x / ln 2. float32."""
    x = mx.where(x < _LOWEST, _LOWEST, mx.where(x > _HIGHEST, _HIGHEST, x))
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2) - n * _LN2_REST
    power = mx.array(_TWICE[0], mx.float32)
    for factor in _TWICE[1:]:
        power = power * r + factor
    # 2ⁿ⁻¹ by its bits: 2¹²⁸, of the largest results, has none.
    half = mx.left_shift(n.astype(mx.int32) + 126, 23).view(mx.float32)
    return power * half
