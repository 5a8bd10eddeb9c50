"""Causal depthwise convolution: each token's channel mixes with the same channel of a few tokens before it."""

import mlx.core as mx

from mlx_transmuter.ops.functional.exponential import scaled_sigmoid
from mlx_transmuter.ops.registry import OperatorError


def depthwise_causal_conv(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None,
    past: mx.array | None,
    *,
    dilation: int = 1,
    activation: str = "none",
) -> tuple[mx.array, mx.array]:
    """Returns the activated convolution of x [batch, seq, channels], and past and x one after the other.

    weight: [channels, 1, taps], the last tap for the token itself; bias: [channels]; past: [batch, (taps - 1) ·
    dilation, channels], the tokens before x, zeros if None; activation: none, silu or swish. Raises OperatorError for
    another activation.
    """
    if activation not in ("none", "silu", "swish"):
        raise OperatorError(f"the activation {activation!r}", "none, silu or swish")
    taps, seq = weight.shape[-1], x.shape[1]
    if past is None:
        past = mx.zeros((x.shape[0], (taps - 1) * dilation, x.shape[2]), dtype=x.dtype)
    history = mx.concatenate([past.astype(x.dtype), x], axis=1)
    # A product per tap, of which there are a few: no kernel for groups of one channel is faster.
    y = history[:, :seq] * weight[:, 0, 0]
    for tap in range(1, taps):
        y = y + history[:, tap * dilation : tap * dilation + seq] * weight[:, 0, tap]
    y = y if bias is None else y + bias
    return y if activation == "none" else scaled_sigmoid(y, y), history
