"""Fused forms: one node for what exporters write in several."""

from functools import partial

import mlx.core as mx

from mlx_transmuter.ops.onnx.activation import gelu, swish
from mlx_transmuter.ops.registry import op


@op("mlx.rms_norm", rowwise=True)
def rms_norm(x, weight=None, *, eps: float):
    """x [..., dim] / √(mean(x²) + eps) · weight [dim]. Zhang & Sennrich 2019; mx.fast.rms_norm."""
    return mx.fast.rms_norm(x, weight, eps)


@op("mlx.rotary")
def rotate_by_tables(x, cos, sin, *, interleaved: int = 0, heads: int = 0):
    """x [..., dim] with its halves, or neighbours where interleaved, rotated by cos and sin, which are alike for
    both of them and broadcast with x; of x [rows, all, seq, dim] the first `heads` alone, where given. Su 2021.
    """
    if heads:  # the others by an angle of 0, so that nothing is parted and joined again
        cos, sin = _extend_table_to_heads(cos, heads, x.shape[1], 1), _extend_table_to_heads(sin, heads, x.shape[1], 0)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = cos[..., ::2], sin[..., ::2]
        turned = mx.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.reshape(x.shape)
    # With the halves the other way round at hand, the rotation is one kernel.
    first, second = mx.split(x, 2, axis=-1)
    before, after = mx.split(sin, 2, axis=-1)
    return x * cos + mx.concatenate([second, first], axis=-1) * mx.concatenate([-before, after], axis=-1)


def _extend_table_to_heads(table: mx.array, heads: int, every: int, value: int) -> mx.array:
    """table [rows, 1 or heads, seq, dim] for the first heads, and `value` for the others: [rows, every, seq, dim]."""
    rows, _, seq, dim = table.shape
    others = mx.full((rows, every - heads, seq, dim), value, table.dtype)
    return mx.concatenate([mx.broadcast_to(table, (rows, heads, seq, dim)), others], axis=1)


ACTIVATIONS_BY_NAME = {
    "silu": swish,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": partial(swish, alpha=1.702),
}


@op("mlx.activate", rowwise=True)
def activate(x, *, kind: str):
    """The activation of x, by its name in ACTIVATIONS. Hendrycks & Gimpel 2016."""
    return ACTIVATIONS_BY_NAME[kind](x)


@op("mlx.gate", rowwise=True)
def gated_activation(x, up, *, kind: str):
    """The activation of x times up: the gated MLP of Shazeer 2020."""
    return ACTIVATIONS_BY_NAME[kind](x) * up
