"""Normalisation: softmax, and scaling by the statistics of an array or of a batch."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import op


@op("Softmax-11")
def softmax_11(x, *, axis=1):
    """exp(x) over its sum along `axis` and all axes after it together. ONNX Softmax-11."""
    return _as_matrix(softmax, x, axis)


@op("Softmax-13")
def softmax(x, *, axis=-1):
    """exp(x) over its sum along `axis`; NaN where all of x is -inf. ONNX Softmax-13."""
    return mx.softmax(x, axis=axis, precise=True) if x.size else x


@op("LogSoftmax-11")
def log_softmax_11(x, *, axis=1):
    """The logarithm of Softmax-11. ONNX LogSoftmax-11."""
    return _as_matrix(log_softmax, x, axis)


@op("LogSoftmax-13")
def log_softmax(x, *, axis=-1):
    """x minus the logarithm of the sum of exp(x) along `axis`. ONNX LogSoftmax-13."""
    return x - mx.logsumexp(x, axis=axis, keepdims=True) if x.size else x


def _as_matrix(function, x: mx.array, axis: int) -> mx.array:
    axis = axis + x.ndim if axis < 0 else axis
    return function(x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), axis=-1).reshape(x.shape)


@op("LayerNormalization-17")
def layer_normalization(x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1, outputs=1):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on; then mean and 1 / deviation.

    scale and bias broadcast to x. The statistics are float32 (stash_type), those axes of them 1. ONNX LayerNormalization-17.
    """
    axis = axis % x.ndim
    last = axis == x.ndim - 1 and scale.shape == x.shape[-1:] and scale.dtype == x.dtype
    if outputs == 1 and last and (bias is None or bias.shape == scale.shape):
        return mx.fast.layer_norm(x, scale, bias, epsilon)
    axes = tuple(range(axis, x.ndim))
    wide = x.astype(mx.float32)
    mean = mx.mean(wide, axis=axes, keepdims=True)
    inverse = mx.rsqrt(mx.mean(mx.square(wide - mean), axis=axes, keepdims=True) + epsilon)
    y = ((wide - mean) * inverse).astype(x.dtype) * scale
    return (y if bias is None else y + bias, mean, inverse)[:outputs]


@op("RMSNormalization-23")
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """x / sqrt(mean(x * x) + epsilon) * scale over the axes from `axis` on; statistics in float32. ONNX RMSNormalization-23."""
    axis = axis % x.ndim
    if axis == x.ndim - 1 and scale.shape == x.shape[-1:] and scale.dtype == x.dtype:
        return mx.fast.rms_norm(x, scale, epsilon)
    wide = x.astype(mx.float32)
    inverse = mx.rsqrt(mx.mean(mx.square(wide), axis=tuple(range(axis, x.ndim)), keepdims=True) + epsilon)
    return (wide * inverse).astype(x.dtype) * scale
