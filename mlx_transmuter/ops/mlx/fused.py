"""Fused operators: one node for what exporters write in several."""

from functools import partial

import mlx.core as mx

from mlx_transmuter.ops.functional import norms
from mlx_transmuter.ops.functional.rotary import rotate_by_full_tables
from mlx_transmuter.ops.onnx.activation import gelu, swish
from mlx_transmuter.ops.registry import op


@op("mlx.rms_norm", rowwise=True)
def rms_norm(x, weight=None, *, eps: float):
    """x [..., dim] / √(mean(x²) + eps) · weight [dim]. Zhang & Sennrich 2019; mx.fast.rms_norm."""
    return norms.rms_norm(x, weight, eps)


@op("mlx.rotary")
def rotary(x, cos, sin, *, interleaved: int = 0, heads: int = 0):
    """x [..., dim] rotated by the angles of cos and sin, which broadcast with x. Su et al. 2021.

    Channel i pairs with i + dim / 2, or 2i with 2i + 1 where interleaved; both have the pair's angle in the tables.
    heads: of x [rows, all heads, seq, dim] only the first `heads` are rotated; 0: all.
    """
    if heads:  # the others are rotated by an angle of 0, so that x is not split and concatenated again
        cos, sin = _extend_table_to_heads(cos, heads, x.shape[1], 1), _extend_table_to_heads(sin, heads, x.shape[1], 0)
    return rotate_by_full_tables(x, cos, sin, bool(interleaved))


def _extend_table_to_heads(table: mx.array, heads: int, all_heads: int, value: int) -> mx.array:
    """Returns table [rows, 1 or heads, seq, dim] for the first heads and `value` for the others: [rows, all heads, seq,
    dim].
    """
    rows, _, seq, dim = table.shape
    others = mx.full((rows, all_heads - heads, seq, dim), value, table.dtype)
    return mx.concatenate([mx.broadcast_to(table, (rows, heads, seq, dim)), others], axis=1)


# The activations of gated and plain MLPs by their names in transformers.
ACTIVATIONS_BY_NAME = {
    "silu": swish,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": partial(swish, alpha=1.702),
}


@op("mlx.activate", rowwise=True)
def activate(x, *, kind: str):
    """The activation of x, by its name in ACTIVATIONS_BY_NAME. Hendrycks & Gimpel 2016."""
    return ACTIVATIONS_BY_NAME[kind](x)


@op("mlx.gate", rowwise=True)
def gated_activation(x, up, *, kind: str):
    """The activation of x times up: the gated MLP of Shazeer 2020."""
    return ACTIVATIONS_BY_NAME[kind](x) * up
