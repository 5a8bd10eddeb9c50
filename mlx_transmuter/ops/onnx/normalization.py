"""Normalization: softmax, and scaling by the statistics of an array or of a batch."""

import math

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import axis_shape
from mlx_transmuter.ops.functional.norms import rms_norm, standardize
from mlx_transmuter.ops.registry import op


@op("Softmax-11")
def softmax_11(x, *, axis=1):
    """exp(x) over its sum along `axis` and all axes after it together. ONNX Softmax-11."""
    return _apply_to_matrix(softmax, x, axis)


@op("Softmax-13")
def softmax(x, *, axis=-1):
    """exp(x) over its sum along `axis`; NaN where all of x is -inf. ONNX Softmax-13."""
    return mx.softmax(x, axis=axis, precise=True) if x.size else x


@op("LogSoftmax-11")
def log_softmax_11(x, *, axis=1):
    """The logarithm of Softmax-11. ONNX LogSoftmax-11."""
    return _apply_to_matrix(log_softmax, x, axis)


@op("LogSoftmax-13")
def log_softmax(x, *, axis=-1):
    """x minus the logarithm of the sum of exp(x) along `axis`. ONNX LogSoftmax-13."""
    return x - mx.logsumexp(x, axis=axis, keepdims=True) if x.size else x


def _apply_to_matrix(function, x: mx.array, axis: int) -> mx.array:
    axis = axis + x.ndim if axis < 0 else axis
    return function(x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), axis=-1).reshape(x.shape)


@op("LayerNormalization-17")
def layer_normalization(x, scale, bias=None, *, axis=-1, epsilon=1e-5, stash_type=1, outputs=1):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from `axis` on; then mean and 1 / deviation.

    scale and bias broadcast to x. The statistics are float32 (stash_type), those axes of them 1. ONNX
    LayerNormalization-17.
    """
    axis = axis % x.ndim
    last = axis == x.ndim - 1 and scale.shape == x.shape[-1:] and scale.dtype == x.dtype
    if outputs == 1 and last and (bias is None or bias.shape == scale.shape):
        return mx.fast.layer_norm(x, scale, bias, epsilon)
    normed, mean, inverse_deviation = standardize(x, tuple(range(axis, x.ndim)), epsilon)
    y = normed.astype(x.dtype) * scale
    return (y if bias is None else y + bias, mean, inverse_deviation)[:outputs]


@op("RMSNormalization-23")
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """x / sqrt(mean(x * x) + epsilon) * scale over the axes from `axis` on; statistics in float32.

    ONNX RMSNormalization-23.
    """
    axis = axis % x.ndim
    if axis == x.ndim - 1 and scale.shape == x.shape[-1:] and scale.dtype == x.dtype:
        return rms_norm(x, scale, epsilon)
    return rms_norm(x, None, epsilon, axis=axis, compute_dtype=mx.float32).astype(x.dtype) * scale


@op("Hardmax-11")
def hardmax_11(x, *, axis=1):
    """1 at the first largest element of `axis` and all axes after it together, else 0. ONNX Hardmax-11."""
    return _apply_to_matrix(hardmax, x, axis)


@op("Hardmax-13")
def hardmax(x, *, axis=-1):
    """1 at the first largest element along `axis`, else 0. ONNX Hardmax-13."""
    places = mx.arange(x.shape[axis]).reshape(axis_shape(axis, x.ndim))
    return (mx.argmax(x, axis=axis, keepdims=True) == places).astype(x.dtype)


def _broadcast_channels(x: mx.array, values: mx.array) -> mx.array:
    """Returns values [channels] in a shape that broadcasts with x [batch, channels, ...]."""
    return values.reshape(axis_shape(min(1, x.ndim - 1), x.ndim))


def _normalize_by_statistics(x, scale, bias, mean, variance, epsilon) -> mx.array:
    factor = scale.astype(mx.float32) * mx.rsqrt(variance.astype(mx.float32) + epsilon)
    shift = bias.astype(mx.float32) - mean.astype(mx.float32) * factor
    return (x * _broadcast_channels(x, factor) + _broadcast_channels(x, shift)).astype(x.dtype)


@op("BatchNormalization-9")
def batch_normalization_9(x, scale, bias, mean, variance, *, epsilon=1e-5, momentum=0.9):
    """x [batch, channels, ...] scaled by the statistics of each channel. ONNX BatchNormalization-9."""
    return _normalize_by_statistics(x, scale, bias, mean, variance, epsilon)


@op("BatchNormalization-14")
def batch_normalization(x, scale, bias, mean, variance, *, epsilon=1e-5, momentum=0.9, training_mode=0, outputs=1):
    """x [batch, channels, ...] scaled by the statistics of each channel; in training by its own, which update those.

    ONNX BatchNormalization-14, 15.
    """
    if not training_mode:
        return _normalize_by_statistics(x, scale, bias, mean, variance, epsilon)
    axes = tuple(i for i in range(x.ndim) if i != 1)
    own_mean, own_variance = mx.mean(x, axis=axes), mx.var(x, axis=axes)
    y = _normalize_by_statistics(x, scale, bias, own_mean, own_variance, epsilon)
    moved = [old * momentum + new * (1 - momentum) for old, new in ((mean, own_mean), (variance, own_variance))]
    return (y, *moved)[:outputs]


@op("InstanceNormalization-6")
def instance_normalization(x, scale, bias, *, epsilon=1e-5):
    """Each channel of each image of x [batch, channels, ...] at mean 0 and variance 1, scaled.

    ONNX InstanceNormalization-6, 22.
    """
    y, _, _ = standardize(x, tuple(range(2, x.ndim)), epsilon)
    return (y * _broadcast_channels(x, scale) + _broadcast_channels(x, bias)).astype(x.dtype)


@op("LRN-1")
def lrn(x, *, size, alpha=0.0001, beta=0.75, bias=1.0):
    """x over (bias + alpha / size * the sum of squares of `size` channels around) to the power of beta.

    ONNX LRN-1, 13.
    """
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    channels = x.shape[1]
    squares = mx.pad(mx.square(x), [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2))
    total = sum((squares[:, i : i + channels] for i in range(1, size)), squares[:, :channels])
    return x / (bias + alpha / size * total) ** beta


@op("LpNormalization-1")
def lp_normalization(x, *, axis=-1, p=2):
    """x over its p-norm along `axis`, 0 where that is 0. ONNX LpNormalization-1, 22."""
    if p == 1:
        norm = mx.sum(mx.abs(x), axis=axis, keepdims=True)
    else:
        norm = mx.sqrt(mx.sum(mx.square(x), axis=axis, keepdims=True))
    return mx.where(norm == 0, mx.zeros_like(x), x / mx.where(norm == 0, mx.ones_like(norm), norm))


@op("GroupNormalization-18")
def group_normalization_18(x, scale, bias, *, num_groups, epsilon=1e-5):
    """GroupNormalization-21 with scale and bias [groups]. ONNX GroupNormalization-18."""
    repeats = x.shape[1] // num_groups
    return group_normalization(
        x, mx.repeat(scale, repeats), mx.repeat(bias, repeats), num_groups=num_groups, epsilon=epsilon
    )


@op("GroupNormalization-21")
def group_normalization(x, scale, bias, *, num_groups, epsilon=1e-5, stash_type=1):
    """The groups of channels of x [batch, channels, ...] at mean 0 and variance 1, scaled by scale and bias [channels].

    ONNX GroupNormalization-21.
    """
    y, _, _ = standardize(x.reshape(x.shape[0], num_groups, -1), (-1,), epsilon)
    return y.reshape(x.shape).astype(x.dtype) * _broadcast_channels(x, scale) + _broadcast_channels(x, bias)


@op("MeanVarianceNormalization-9")
def mean_variance_normalization(x, *, axes=(0, 2, 3)):
    """x at mean 0 and variance 1 over the axes. ONNX MeanVarianceNormalization-9, 13."""
    wide = x.astype(mx.float32)
    centred = wide - mx.mean(wide, axis=tuple(axes), keepdims=True)
    deviation = mx.sqrt(mx.mean(mx.square(centred), axis=tuple(axes), keepdims=True))
    return (centred / (deviation + 1e-9)).astype(x.dtype)
