"""Fused forms: one node for what exporters write in several."""

import mlx.core as mx
import mlx.nn as nn

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
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def silu(x):
    """x · sigmoid(x). In float32 as x / (1 + e⁻ˣ), which the CPU computes in three quarters of the time."""
    return x / (1 + mx.exp(-x)) if x.dtype == mx.float32 else nn.silu(x)


ACTIVATIONS = {
    "silu": silu,
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,
}


@op("mlx.activate")
def activate(x, *, kind: str):
    """The activation of x, by its name in ACTIVATIONS. Hendrycks & Gimpel 2016."""
    return ACTIVATIONS[kind](x)


@op("mlx.gate")
def gate(x, up, *, kind: str):
    """The activation of x times up: the gated MLP of Shazeer 2020."""
    return ACTIVATIONS[kind](x) * up
