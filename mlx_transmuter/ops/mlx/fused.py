"""Fused operators: one node for what exporters write in several."""

from functools import partial

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
    return rotate_by_full_tables(x, cos, sin, bool(interleaved), rotated_heads=heads or None)


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
