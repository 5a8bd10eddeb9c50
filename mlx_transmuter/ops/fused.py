"""Fused forms: one node for what exporters write in several."""

import mlx.core as mx
import mlx.nn as nn

from mlx_transmuter.ops.registry import op


@op("mlx.rms_norm")
def rms_norm(x, weight=None, *, eps: float):
    """x [..., dim] / √(mean(x²) + eps) · weight [dim]. Zhang & Sennrich 2019; mx.fast.rms_norm."""
    return mx.fast.rms_norm(x, weight, eps)


@op("mlx.rotary")
def rotary(x, cos, sin):
    """x [rows, heads, seq, dim] with its halves rotated by cos and sin [rows, 1, seq, dim], whose halves are alike. Su
    2021.
    """
    half = x.shape[3] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


ACTIVATIONS = {
    "silu": nn.silu,
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
