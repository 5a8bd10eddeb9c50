"""Linear attention and the short convolution before it: layers that carry a state of fixed size from token to token."""

import mlx.core as mx

from mlx_transmuter.ops.onnx.activation import swish
from mlx_transmuter.ops.onnx.attention import split_heads
from mlx_transmuter.ops.onnx.convolution import convolve
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
    gated, delta = update_rule in ("gated", "gated_delta"), update_rule in ("delta", "gated_delta")
    if not (gated or delta) and update_rule != "linear":
        raise OperatorError(f"the update rule {update_rule!r}", "linear, gated, delta or gated_delta")
    if (decay is None) == gated or (beta is None) == delta:
        raise OperatorError(
            f"the rule {update_rule} with these inputs", "decay for the gated rules, beta for the delta rules"
        )
    batch, tokens, _ = q.shape
    group = q_num_heads // kv_num_heads
    dtype = q.dtype
    queries = split_heads(q, q_num_heads).astype(mx.float32)
    keys, values = (split_heads(x, kv_num_heads).astype(mx.float32) for x in (k, v))
    dk, dv = keys.shape[-1], values.shape[-1]
    state = mx.zeros((batch, kv_num_heads, dk, dv)) if past_state is None else past_state.astype(mx.float32)
    gates = None if decay is None else mx.exp(split_heads(decay.astype(mx.float32), kv_num_heads))
    rates = None if beta is None else beta.astype(mx.float32).swapaxes(1, 2)[..., None]
    if delta and (gates is None or gates.shape[-1] == 1):
        y, state = _fused_delta_rule(queries, keys, values, gates, rates, state, group)
    else:
        y, state = _recurrence_by_token(queries, keys, values, gates, rates, state, group)
    y = (y * (scale or dk**-0.5)).swapaxes(1, 2).reshape(batch, tokens, -1).astype(dtype)
    return (y, state.astype(dtype if past_state is None else past_state.dtype))[:outputs]


def _fused_delta_rule(q, k, v, gates, rates, state, queries_per_kv_head):
    """The delta rules with one gate per head, by MLX's kernel: tokens before heads, as many key as query heads."""
    if queries_per_kv_head > 1:
        k, v, state = (mx.repeat(x, queries_per_kv_head, axis=1) for x in (k, v, state))
        gates, rates = (
            x if x is None or x.shape[1] == 1 else mx.repeat(x, queries_per_kv_head, axis=1) for x in (gates, rates)
        )
    shape = q.shape[:3]
    gates, rates = (mx.ones(shape) if x is None else mx.broadcast_to(x[..., 0], shape) for x in (gates, rates))
    parts = [x.swapaxes(1, 2) for x in (q, k, v, gates, rates)]
    y, state = mx.fast.gated_delta_update(*parts, state.swapaxes(2, 3))
    return y.swapaxes(1, 2), state.swapaxes(2, 3)[:, ::queries_per_kv_head]


def _recurrence_by_token(q, k, v, gates, rates, state, queries_per_kv_head):
    results = []
    for t in range(q.shape[2]):
        value = v[:, :, t]
        if gates is not None:
            state = state * gates[:, :, t, :, None]
        if rates is not None:
            value = rates[:, :, t] * (value - mx.sum(state * k[:, :, t, :, None], axis=2))
        state = state + k[:, :, t, :, None] * value[:, :, None, :]
        read = mx.repeat(state, queries_per_kv_head, axis=1) if queries_per_kv_head > 1 else state
        results.append(mx.sum(read * q[:, :, t, :, None], axis=2))
    return mx.stack(results, axis=2), state


@op("CausalConvWithState-27")
def causal_conv_with_state(x, w, bias=None, past_state=None, *, activation="none", outputs=2):
    """Each channel of x [batch, channels, length] convolved with w [channels, 1, k], and its last k - 1 elements.

    past_state [batch, channels, k - 1] goes before x, zeros without it; activation "none", "silu" or "swish" comes
    after. ONNX CausalConvWithState-27.
    """
    if activation not in ("none", "silu", "swish"):
        raise OperatorError(f"the activation {activation!r}", "none, silu or swish")
    reach = w.shape[2] - 1
    past = mx.zeros((*x.shape[:2], reach), x.dtype) if past_state is None else past_state
    whole = mx.concatenate([past, x], axis=2)
    y = convolve(whole, w, [0], [0], groups=x.shape[1])
    y = y if bias is None else y + bias[:, None]
    y = y if activation == "none" else swish(y)
    return (y, whole[:, :, whole.shape[2] - reach :])[:outputs]
