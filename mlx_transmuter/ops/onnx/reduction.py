"""Reductions along axes, which are an attribute in older operator versions and an input known on the host in newer."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_transmuter.ops.integer_ranges import RangeRule, range_of_elements_sum
from mlx_transmuter.ops.registry import HostArray, op


def _l2(x: mx.array, **to) -> mx.array:
    return mx.sqrt(mx.sum(mx.square(x.astype(mx.float32)), **to))


def _reduce(x: mx.array, axes: Any, keepdims: int, noop: int, function: Callable, empty: float) -> mx.array:
    """Returns function(x) over the axes (without axes: over all, or x where `noop`), in x's type.

    empty: the result over no elements.
    """
    chosen = tuple(sorted({axis % x.ndim for axis in axes})) if axes else ()
    if not chosen and not noop:
        chosen = tuple(range(x.ndim))
    if x.size == 0:
        # MLX's reductions of no elements read uninitialized memory and may not end.
        shape = [1 if i in chosen else n for i, n in enumerate(x.shape) if keepdims or i not in chosen]
        return mx.full(shape, _clamp_to_dtype(empty, x.dtype), x.dtype)
    # Over one element, a root or logarithm of a sum still applies; mean, max and the like are the element itself.
    return function(x, axis=chosen, keepdims=bool(keepdims)).astype(x.dtype)


def _clamp_to_dtype(value: float, dtype: mx.Dtype) -> float | int | bool:
    """Returns the value, or the largest or smallest of `dtype` for an infinite one."""
    if dtype == mx.bool_:
        return value > 0
    if mx.issubdtype(dtype, mx.integer):
        limits = mx.iinfo(dtype)
        return 0 if math.isnan(value) else int(min(max(value, limits.min), limits.max))
    return value


def _declare_reduction(
    kind: str,
    since: int,
    function: Callable,
    empty: float,
    what: str,
    versions: str,
    integer_range: RangeRule | None = None,
) -> None:
    """Declares ONNX's `kind`: axes as an attribute until `since`, as an input from it on."""

    def with_attribute(x, *, axes=None, keepdims=1):
        return _reduce(x, axes, keepdims, 0, function, empty)

    def with_input(x, axes: HostArray = None, *, keepdims=1, noop_with_empty_axes=0):
        listed = None if axes is None else axes.reshape(-1).tolist()
        return _reduce(x, listed, keepdims, noop_with_empty_axes, function, empty)

    with_attribute.__doc__ = f"{what} along axes (all by default). ONNX {kind}-11 to {since - 1}."
    with_input.__doc__ = f"{what} along axes, int64 [r] (all by default). ONNX {kind}-{versions}."
    op(f"{kind}-11", integer_range=integer_range)(with_attribute)
    op(f"{kind}-{since}", integer_range=integer_range)(with_input)


_declare_reduction("ReduceSum", 13, mx.sum, 0, "The sum of x", "13", range_of_elements_sum)
_declare_reduction("ReduceMean", 18, mx.mean, math.nan, "The mean of x", "18")
_declare_reduction(
    "ReduceMax", 18, mx.max, -math.inf, "The largest element of x, -inf or the smallest value of none", "18, 20"
)
_declare_reduction(
    "ReduceMin", 18, mx.min, math.inf, "The smallest element of x, inf or the largest value of none", "18, 20"
)
_declare_reduction("ReduceProd", 18, mx.prod, 1, "The product of x", "18")
_declare_reduction("ReduceL1", 18, lambda x, **to: mx.sum(mx.abs(x), **to), 0, "The sum of |x|", "18")
_declare_reduction("ReduceL2", 18, _l2, 0, "The root of the sum of x * x", "18")
_declare_reduction("ReduceSumSquare", 18, lambda x, **to: mx.sum(mx.square(x), **to), 0, "The sum of x * x", "18")
_declare_reduction(
    "ReduceLogSum", 18, lambda x, **to: mx.log(mx.sum(x, **to)), -math.inf, "The logarithm of the sum of x", "18, 28"
)
_declare_reduction("ReduceLogSumExp", 18, mx.logsumexp, -math.inf, "The logarithm of the sum of exp(x)", "18, 28")
