"""Linear attention and the short convolution before it: layers that carry a state of fixed size from token to token."""

import mlx.core as mx

from mlx_transmuter.ops.functional.causal_conv import depthwise_causal_conv
from mlx_transmuter.ops.functional.heads import repeat_heads
from mlx_transmuter.ops.functional.linear_recurrence import (
    RecurrenceInputs,
    linear_recurrence_by_token,
    recurrence_inputs,
    terms_of_rule,
)
from mlx_transmuter.ops.registry import OperatorError, op


@op("LinearAttention-27")
def linear_attention(
    q,
    k,
    v,
    past_state=None,
    decay=None,
    beta=None,
    *,
    chunk_size=64,
    kv_num_heads,
    q_num_heads,
    scale=0.0,
    update_rule="gated_delta",
    outputs=2,
):
    """o = scale * S q after S = exp(decay) S + beta k (v - S k) for each token; the gates go by update_rule.

    q [batch, tokens, q heads * dk], k [..., kv heads * dk], v [..., kv heads * dv], past_state [batch, kv heads, dk,
    dv], decay [..., kv heads] or [..., kv heads * dk], beta [..., kv heads] or [..., 1]. Gives [batch, tokens, q heads
    * dv] and the last state. update_rule "linear", "gated", "delta" or "gated_delta". Computed in float32. ONNX
    LinearAttention-27.
    """
    rule_decay, rule_beta = terms_of_rule(update_rule, decay, beta)
    if rule_decay is not decay or rule_beta is not beta:
        raise OperatorError(
            f"the rule {update_rule} with these inputs", "decay for the gated rules, beta for the delta rules"
        )
    batch, seq, _ = q.shape
    tokens = recurrence_inputs(q, k, v, decay, beta, q_heads=q_num_heads, kv_heads=kv_num_heads)
    dim, v_dim = tokens.k.shape[-1], tokens.v.shape[-1]
    scale = scale or dim**-0.5
    if past_state is None:
        state = mx.zeros((batch, q_num_heads, dim, v_dim))
    else:
        state = repeat_heads(past_state.astype(mx.float32), q_num_heads)
    if tokens.beta is not None and (tokens.decay is None or tokens.decay.shape[-1] == 1):
        y, state = _fused_delta_rule(tokens, state, scale)
    else:
        y, state = linear_recurrence_by_token(tokens, state, scale)
    state = state[:, :: q_num_heads // kv_num_heads].astype(q.dtype if past_state is None else past_state.dtype)
    return (y.swapaxes(1, 2).reshape(batch, seq, -1).astype(q.dtype), state)[:outputs]


def _fused_delta_rule(tokens: RecurrenceInputs, state: mx.array, scale: float) -> tuple[mx.array, mx.array]:
    """Returns what `linear_recurrence` does for a delta rule with one decay per head, by MLX's kernel."""
    shape = tokens.q.shape[:3]
    gates = mx.ones(shape) if tokens.decay is None else mx.broadcast_to(mx.exp(tokens.decay[..., 0]), shape)
    assert tokens.beta is not None
    rates = mx.broadcast_to(tokens.beta[..., 0], shape)
    # The kernel has the tokens before the heads, and the state transposed.
    q, k, v, gates, rates = (x.swapaxes(1, 2) for x in (tokens.q, tokens.k, tokens.v, gates, rates))
    y, state = mx.fast.gated_delta_update(q, k, v, gates, rates, state.swapaxes(2, 3))
    return y.swapaxes(1, 2) * scale, state.swapaxes(2, 3)


@op("CausalConvWithState-27")
def causal_conv_with_state(x, w, bias=None, past_state=None, *, activation="none", outputs=2):
    """Each channel of x [batch, channels, length] convolved with w [channels, 1, k], and its last k - 1 elements.

    past_state [batch, channels, k - 1] goes before x, zeros without it; activation "none", "silu" or "swish" comes
    after. ONNX CausalConvWithState-27.
    """
    # In float32, as ONNX defines no rounding of a half-precision sum between its taps.
    bias, past = (None if array is None else array.astype(mx.float32) for array in (bias, past_state))
    y, history = depthwise_causal_conv(
        x.astype(mx.float32).swapaxes(1, 2),
        w.astype(mx.float32),
        bias,
        None if past is None else past.swapaxes(1, 2),
        activation=activation,
    )
    state = history[:, history.shape[1] - (w.shape[2] - 1) :]
    return (y.swapaxes(1, 2).astype(x.dtype), state.swapaxes(1, 2).astype(x.dtype))[:outputs]
