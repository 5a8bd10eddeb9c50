"""Dropout and random arrays. The numbers are MLX's own; ONNX specifies only their distribution."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import HostArray, op
from mlx_transmuter.ops.types import device_dtype


def _random_key(seed: float | None) -> mx.array | None:
    """Returns the key of a seed, from its bits, as ONNX's seeds are floats; None for MLX's own state."""
    return None if seed is None else mx.random.key(int(np.float32(seed).view(np.uint32)))


def _dropout(x: mx.array, ratio: float, training: bool, seed: float | None, outputs: int):
    if training and ratio > 0:
        mask = mx.random.bernoulli(1 - ratio, x.shape, _random_key(seed))
        y = mx.where(mask, x / (1 - ratio) if ratio < 1 else x, 0).astype(x.dtype)
    else:
        y, mask = x, mx.ones(x.shape, mx.bool_)
    return (y, mask)[:outputs]


@op("Dropout-10")
def dropout_10(x, *, ratio=0.5, outputs=1):
    """x itself and a mask of true, as in use; the ratio is for training. ONNX Dropout-10."""
    return _dropout(x, ratio, False, None, outputs)


@op("Dropout-12")
def dropout(x, ratio: HostArray = None, training_mode: HostArray = None, *, seed=None, outputs=1):
    """x itself, or in training with the share `ratio` set to 0 and the rest scaled; and the mask.

    ONNX Dropout-12, 13, 22.
    """
    training = training_mode is not None and bool(training_mode.item())
    return _dropout(x, 0.5 if ratio is None else float(ratio.item()), training, seed, outputs)


@op("RandomNormal-1")
def random_normal(*, shape, dtype=1, mean=0.0, scale=1.0, seed=None):
    """Normally distributed numbers of that shape and ONNX type. ONNX RandomNormal-1, 22."""
    return mx.random.normal(shape, dtype=mx.float32, loc=mean, scale=scale, key=_random_key(seed)).astype(
        device_dtype(dtype)
    )


@op("RandomNormalLike-1")
def random_normal_like(x, *, dtype=None, mean=0.0, scale=1.0, seed=None):
    """Normally distributed numbers of x's shape, and of its type without `dtype`. ONNX RandomNormalLike-1, 22."""
    drawn = mx.random.normal(x.shape, dtype=mx.float32, loc=mean, scale=scale, key=_random_key(seed))
    return drawn.astype(x.dtype if dtype is None else device_dtype(dtype))


@op("RandomUniform-1")
def random_uniform(*, shape, dtype=1, high=1.0, low=0.0, seed=None):
    """Numbers spread evenly over [low, high) of that shape and ONNX type. ONNX RandomUniform-1, 22."""
    return mx.random.uniform(low, high, shape, key=_random_key(seed)).astype(device_dtype(dtype))


@op("RandomUniformLike-1")
def random_uniform_like(x, *, dtype=None, high=1.0, low=0.0, seed=None):
    """Numbers spread evenly over [low, high) of x's shape, and of its type without `dtype`.

    ONNX RandomUniformLike-1, 22.
    """
    drawn = mx.random.uniform(low, high, x.shape, key=_random_key(seed))
    return drawn.astype(x.dtype if dtype is None else device_dtype(dtype))


@op("Bernoulli-15")
def bernoulli(x, *, dtype=None, seed=None):
    """1 with the chance x, else 0, in x's type without `dtype`. ONNX Bernoulli-15, 22."""
    return mx.random.bernoulli(x, key=_random_key(seed)).astype(x.dtype if dtype is None else device_dtype(dtype))


@op("Multinomial-7")
def multinomial(x, *, dtype=6, sample_size=1, seed=None):
    """sample_size classes [batch, sample_size] drawn by the log-probabilities x [batch, classes].

    ONNX Multinomial-7, 22.
    """
    return mx.random.categorical(x, num_samples=sample_size, key=_random_key(seed)).astype(device_dtype(dtype))
