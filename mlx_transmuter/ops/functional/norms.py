"""Normalization by the mean square, or by mean and variance, of the elements along some axes."""

import math

import mlx.core as mx


def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, *, axis: int = -1, compute_dtype: mx.Dtype | None = None
) -> mx.array:
    """Returns x / √(mean(x²) + eps) · weight over the axes from `axis` on, in x's shape. Zhang & Sennrich 2019.

    weight: as many elements as those axes have; None for none. compute_dtype: x and weight are cast to it first, and
    the result has it; by default both keep their types.
    """
    if compute_dtype is not None:
        x, weight = x.astype(compute_dtype), None if weight is None else weight.astype(compute_dtype)
    if weight is not None:
        weight = weight.flatten()
    axis %= x.ndim
    if axis == x.ndim - 1:
        return mx.fast.rms_norm(x, weight, eps)
    rows = x.reshape(*x.shape[:axis], math.prod(x.shape[axis:]))
    return mx.fast.rms_norm(rows, weight, eps).reshape(x.shape)


def inverse_rms(x: mx.array, eps: float, *, axis: int = -1) -> mx.array:
    """Returns 1 / √(mean(x²) + eps) over the axes from `axis` on, float32; those axes have size 1."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    return mx.rsqrt(mx.mean(mx.square(x.astype(mx.float32)), axis=axes, keepdims=True) + eps)


def standardize(x: mx.array, axes: tuple[int, ...], eps: float) -> tuple[mx.array, mx.array, mx.array]:
    """Returns (x - mean) / √(variance + eps) over the axes, the mean and 1 / √(variance + eps): all float32.

    The axes of the two statistics have size 1. Ba et al. 2016.
    """
    x = x.astype(mx.float32)
    mean = mx.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    inverse_deviation = mx.rsqrt(mx.mean(mx.square(centred), axis=axes, keepdims=True) + eps)
    return centred * inverse_deviation, mean, inverse_deviation
