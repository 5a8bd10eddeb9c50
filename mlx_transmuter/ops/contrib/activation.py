"""Activations of com.microsoft, with the biases that they are fused with, and those that other fused operators name."""

from collections.abc import Sequence

import mlx.core as mx

from mlx_transmuter.ops.onnx.activation import ACTIVATIONS_BY_OP_TYPE, gelu, swish, swish_gate
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


def apply_fused_activation(activation: str | None, x: mx.array, parameters: Sequence[float | None]) -> mx.array:
    """Returns x after the activation that a fused operator names, or x itself for none.

    parameters: the values of the activation's parameters in their order, None for a default. Raises OperatorError for
    an unknown activation.
    """
    if not activation:
        return x
    if activation == "Clip":
        return mx.clip(x, *parameters[:2])
    if activation not in ACTIVATIONS_BY_OP_TYPE:
        raise OperatorError(f"the activation {activation!r}", f"one of Clip, {', '.join(ACTIVATIONS_BY_OP_TYPE)}")
    return ACTIVATIONS_BY_OP_TYPE[activation].bind(parameters)(x)


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
    return gelu(x if bias is None else x + bias, approximate="tanh")


@op("com.microsoft.QuickGelu-1")
def quick_gelu(x, *, alpha: float = 1.702):
    """x · sigmoid(alpha · x), any shape. com.microsoft QuickGelu-1."""
    return swish(x, alpha=alpha)


@op("com.microsoft.ScaledSiLU-1")
def scaled_silu(x, scale=None, *, alpha: float = 1.0):
    """z · sigmoid(z) of z = scale · x, scale being alpha where absent. com.microsoft ScaledSiLU-1."""
    z = (x.astype(mx.float32) * (alpha if scale is None else scale.astype(mx.float32).reshape(()))).astype(x.dtype)
    return swish(z)


@op("com.microsoft.SwiGLU-1")
def swiglu(
    gate,
    up=None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    round_activation: int = 0,
):
    """gate · sigmoid(alpha · gate) · (up + beta), in float32 within; both clamped by a positive limit.

    Without up, gate [..., 2 · dim] holds both side by side. Shazeer 2020; com.microsoft SwiGLU-1.
    """
    dtype = gate.dtype
    if up is None:
        gate, up = mx.split(gate, 2, axis=-1)
    return swish_gate(
        gate.astype(mx.float32),
        up.astype(mx.float32),
        alpha=activation_alpha,
        beta=activation_beta,
        limit=limit if limit > 0 else None,
        rounding_dtype=dtype if round_activation else None,
    ).astype(dtype)


@op("com.microsoft.BiasSplitGelu-1")
def bias_split_gelu(x, bias):
    """The left half of x [..., dim] + bias [dim] times gelu of the right: [..., dim / 2]. BiasSplitGelu-1."""
    left, right = mx.split(x + bias, 2, axis=-1)
    return left * gelu(right)


@op("com.microsoft.BiasAdd-1")
def bias_add(x, bias, skip):
    """x [batch, seq, dim] + bias [dim] + skip [batch, seq, dim]. com.microsoft BiasAdd-1."""
    return x + bias + skip


@op("com.microsoft.GatedAdd-1")
def gated_add(x, y, gate, gate_weight=None):
    """x + y · gate [..., 1]; with gate_weight [k, 1], x + y · sigmoid(gate [..., k] · gate_weight). GatedAdd-1."""
    return x + y * (gate if gate_weight is None else mx.sigmoid(gate @ gate_weight))


@op("com.microsoft.BiasDropout-1")
def bias_dropout(
    x, bias, residual=None, ratio=None, training_mode: HostArray = None, *, seed: int = 0, outputs: int = 1
):
    """x + bias + residual, as inference drops nothing; and the mask of what remains. com.microsoft BiasDropout-1."""
    if training_mode is not None and training_mode.any():
        raise OperatorError("training_mode", "a graph for inference", "export it in evaluation mode")
    total = x + bias if residual is None else x + bias + residual
    return total if outputs == 1 else (total, mx.ones(x.shape, dtype=mx.bool_))


@op("com.microsoft.BiasSoftmax-1")
def bias_softmax(x, bias, *, is_inner_broadcast: int, axis: int = 1):
    """The softmax of x + bias over the axes from axis on; bias has x's axes, 1 where it is broadcast. BiasSoftmax-1."""
    return mx.softmax(x + bias, axis=list(range(axis % x.ndim, x.ndim)), precise=True)
