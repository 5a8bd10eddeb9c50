"""Reductions along axes, which are an attribute of the older forms and an input, known on the host, of the newer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import Host, op


def _max(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.max(_or_filler(x, axes, lowest=True), axis=axes, keepdims=keep)


def _min(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.min(_or_filler(x, axes, lowest=False), axis=axes, keepdims=keep)


def _or_filler(x: mx.array, axes: tuple[int, ...], lowest: bool) -> mx.array:
    """x, or where a reduced axis is empty one element of it that loses against every other."""
    if all(x.shape[axis] for axis in axes):
        return x
    if mx.issubdtype(x.dtype, mx.floating):
        filler = -mx.inf if lowest else mx.inf
    elif x.dtype == mx.bool_:
        filler = not lowest
    else:
        filler = mx.iinfo(x.dtype).min if lowest else mx.iinfo(x.dtype).max
    return mx.full([1 if i in axes else n for i, n in enumerate(x.shape)], filler, x.dtype)


def _sum(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.sum(x, axis=axes, keepdims=keep)


def _mean(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.mean(x, axis=axes, keepdims=keep)


def _prod(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.prod(x, axis=axes, keepdims=keep)


def _l1(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.sum(mx.abs(x), axis=axes, keepdims=keep)


def _l2(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.sqrt(mx.sum(mx.square(x.astype(mx.float32)), axis=axes, keepdims=keep))


def _sum_square(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.sum(mx.square(x), axis=axes, keepdims=keep)


def _log_sum(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    return mx.log(mx.sum(x, axis=axes, keepdims=keep))


def _log_sum_exp(x: mx.array, axes: tuple[int, ...], keep: bool) -> mx.array:
    if not all(x.shape[axis] for axis in axes):
        return _log_sum(x, axes, keep)
    return mx.logsumexp(x, axis=axes, keepdims=keep)


def _reduced(x: mx.array, axes: Any, keepdims: int, noop: int, function: Callable) -> mx.array:
    """function over the axes (all if none are given and not `noop`), in x's own type."""
    chosen = tuple(sorted({axis % x.ndim for axis in axes})) if axes else ()
    if not chosen and not noop:
        chosen = tuple(range(x.ndim))
    # The root and the logarithm of a sum hold for one element too; mean, max and the like are the element itself.
    return function(x, chosen, bool(keepdims)).astype(x.dtype)


def _declare(kind: str, since: int, function: Callable, what: str, versions: str) -> None:
    """Declares ONNX's `kind`: axes as an attribute until `since`, as an input from it on."""

    def with_attribute(x, *, axes=None, keepdims=1):
        return _reduced(x, axes, keepdims, 0, function)

    def with_input(x, axes: Host = None, *, keepdims=1, noop_with_empty_axes=0):
        listed = None if axes is None else np.ravel(axes).tolist()
        return _reduced(x, listed, keepdims, noop_with_empty_axes, function)

    with_attribute.__doc__ = f"{what} along axes (all by default). ONNX {kind}-11 to {since - 1}."
    with_input.__doc__ = f"{what} along axes, int64 [r] (all by default). ONNX {kind}-{versions}."
    op(f"{kind}-11")(with_attribute)
    op(f"{kind}-{since}")(with_input)


_declare("ReduceSum", 13, _sum, "The sum of x", "13")
_declare("ReduceMean", 18, _mean, "The mean of x", "18")
_declare("ReduceMax", 18, _max, "The largest element of x, -inf (or the smallest value) of none", "18, 20")
_declare("ReduceMin", 18, _min, "The smallest element of x, inf (or the largest value) of none", "18, 20")
_declare("ReduceProd", 18, _prod, "The product of x", "18")
_declare("ReduceL1", 18, _l1, "The sum of |x|", "18")
_declare("ReduceL2", 18, _l2, "The root of the sum of x * x", "18")
_declare("ReduceSumSquare", 18, _sum_square, "The sum of x * x", "18")
_declare("ReduceLogSum", 18, _log_sum, "The logarithm of the sum of x", "18, 28")
_declare("ReduceLogSumExp", 18, _log_sum_exp, "The logarithm of the sum of exp(x)", "18, 28")
