"""Activations of com.microsoft, with the biases that they are fused with."""

import math

import mlx.core as mx

from mlx_transmuter.ops.registry import op


def gelu(x: mx.array) -> mx.array:
    """x · Φ(x), Φ the normal distribution's cumulative function. Hendrycks & Gimpel 2016."""
    return x * 0.5 * (1 + mx.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: mx.array) -> mx.array:
    """The tanh approximation of gelu, as in GPT-2. Hendrycks & Gimpel 2016."""
    return x * 0.5 * (1 + mx.tanh(x * (0.035677408136300125 * x * x + 0.7978845608028654)))


@op("com.microsoft.Gelu-1")
def gelu_exact(x):
    """gelu of x, any shape. com.microsoft Gelu-1."""
    return gelu(x)


@op("com.microsoft.BiasGelu-1")
def bias_gelu(x, bias):
    """gelu of x [..., dim] + bias [dim]. com.microsoft BiasGelu-1."""
    return gelu(x + bias)


@op("com.microsoft.FastGelu-1")
def fast_gelu(x, bias=None):
    """The tanh approximation of gelu of x [..., dim] + bias [dim]. com.microsoft FastGelu-1."""
    return gelu_tanh(x if bias is None else x + bias)


@op("com.microsoft.QuickGelu-1")
def quick_gelu(x, *, alpha: float = 1.702):
    """x · sigmoid(alpha · x), any shape. com.microsoft QuickGelu-1."""
    return x * mx.sigmoid(alpha * x)
