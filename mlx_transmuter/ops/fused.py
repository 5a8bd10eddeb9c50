"""Fused forms: one node for what exporters write in several."""

from functools import partial

import mlx.core as mx

from mlx_transmuter.ops.activation import gelu, swish
from mlx_transmuter.ops.registry import op


@op("mlx.rms_norm")
def rms_norm(x, weight=None, *, eps: float):
    """x [..., dim] / √(mean(x²) + eps) · weight [dim]. Zhang & Sennrich 2019; mx.fast.rms_norm."""
    return mx.fast.rms_norm(x, weight, eps)


@op("mlx.rotary")
def rotary(x, cos, sin, *, interleaved: int = 0):
    """x [..., dim] with its halves, or neighbours where interleaved, rotated by cos and sin, which are alike for
    both of them and broadcast with x. Su 2021.
    """
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = cos[..., ::2], sin[..., ::2]
        turned = mx.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(x.shape)
    # With the halves the other way round at hand, the rotation is one kernel.
    first, second = mx.split(x, 2, axis=-1)
    before, after = mx.split(sin, 2, axis=-1)
    return x * cos + mx.concatenate([second, first], axis=-1) * mx.concatenate([-before, after], axis=-1)


ACTIVATIONS = {
    "silu": swish,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": partial(swish, alpha=1.702),
}


@op("mlx.activate")
def activate(x, *, kind: str):
    """The activation of x, by its name in ACTIVATIONS. Hendrycks & Gimpel 2016."""
    return ACTIVATIONS[kind](x)


@op("mlx.gate")
def gate(x, up, *, kind: str):
    """The activation of x times up: the gated MLP of Shazeer 2020."""
    return ACTIVATIONS[kind](x) * up
