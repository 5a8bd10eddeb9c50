"""Linear attention of com.microsoft: a state of one size in place of a cache, as in Gated DeltaNet and RetNet."""

import math
from itertools import pairwise

import mlx.core as mx

from mlx_transmuter.ops.functional.heads import repeat_heads
from mlx_transmuter.ops.functional.indexing import element
from mlx_transmuter.ops.functional.linear_recurrence import (
    RecurrenceInputs,
    linear_recurrence,
    recurrence_inputs,
    terms_of_rule,
)
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("com.microsoft.LinearAttention-1")
def linear_attention(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
):
    """Attention over a state S [batch, kv heads, dim, v dim] that each token decays and updates; and the last state.

    query: [batch, seq, heads · dim]; key: [batch, seq, kv heads · dim]; value: [batch, seq, kv heads · v dim]; decay,
    its logarithm: [batch, seq, kv heads] or [batch, seq, kv heads · dim]; beta: [batch, seq, kv heads or 1]. The output
    has a head per query head, or per kv head where there are more of these. With state_window w the states are [w,
    batch, …]: those after the last w tokens, zeros where there are fewer. chunk_size affects only the speed of other
    implementations. com.microsoft LinearAttention-1.
    """
    heads = max(q_num_heads, kv_num_heads)
    batch, seq, _ = query.shape
    decay, beta = terms_of_rule(update_rule, decay, beta)
    tokens = recurrence_inputs(query, key, value, decay, beta, q_heads=q_num_heads, kv_heads=kv_num_heads)
    dtype = query.dtype if past_state is None else past_state.dtype
    if past_state is None:
        state = mx.zeros((batch, heads, tokens.k.shape[-1], tokens.v.shape[-1]))
    else:
        state = repeat_heads((element(past_state, -1) if state_window else past_state).astype(mx.float32), heads)
    y, states = _recurrence_with_last_states(
        tokens, state, scale or 1 / math.sqrt(tokens.q.shape[-1]), max(state_window, 1)
    )
    present = states[:, :, :: heads // kv_num_heads].astype(dtype)
    y = y.transpose(0, 2, 1, 3).reshape(batch, seq, -1).astype(query.dtype)
    return y, present if state_window else present[0]


def _recurrence_with_last_states(
    tokens: RecurrenceInputs, state: mx.array, scale: float, window: int
) -> tuple[mx.array, mx.array]:
    """Returns the recurrence's output, and the states after the last tokens: [window, batch, heads, dim, v dim]."""
    seq = tokens.k.shape[2]
    # One run up to the first token whose state is an output, then token by token.
    bounds = [0, *range(max(seq - window + 1, 1), seq + 1)]
    outputs, states = [], [mx.zeros_like(state)] * max(window - seq, 0)
    for begin, end in pairwise(bounds):
        y, state = linear_recurrence(tokens.slice(begin, end), state, scale)
        outputs.append(y)
        states.append(state)
    return mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0], mx.stack(states)


@op("com.microsoft.LinearAttentionGate-1")
def linear_attention_gate(a, dt_bias, decay_scale, b=None, *, outputs: int = 1):
    """decay_scale · softplus(a + dt_bias) [..., heads], in float32 within; and sigmoid(b). LinearAttentionGate-1."""
    decay = (decay_scale * mx.logaddexp(a.astype(mx.float32) + dt_bias, 0.0)).astype(a.dtype)
    return decay if outputs == 1 or b is None else (decay, mx.sigmoid(b.astype(mx.float32)).astype(b.dtype))


@op("com.microsoft.GatedDeltaNet-1")
def gated_delta_net(
    query,
    key=None,
    value=None,
    cu_seqlens: HostArray = None,
    decay=None,
    beta=None,
    initial_state=None,
    a_log=None,
    dt_bias=None,
    capture_count=None,
    state_update_active=None,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
):
    """LinearAttention with its gates fused in, of [batch, seq, heads, dim] or tokens in one row, [tokens, heads, dim].

    query, key: heads of dim; value: a multiple of the heads, of v dim; or all three packed in query. decay, beta: one
    number per head and token, or per channel. The states are transposed: float32 [batch, value heads, v dim, dim].
    cu_seqlens: where the sequences in one row begin and end, [batch + 1]; without it they have equal lengths.
    gate_activation: "softplus" for -exp(a_log) · softplus(decay + dt_bias), "sigmoid" for gate_lower_bound ·
    sigmoid(exp(a_log) · (decay + dt_bias)). com.microsoft GatedDeltaNet-1.
    """
    if state_update_capacity:
        raise OperatorError("state_update_capacity", "0: transitions are for engines that draft tokens")
    if key is None or value is None:
        query, key, value = _split_packed_qkv(query, initial_state)
    lead, heads = query.shape[:-2], value.shape[-2]
    if decay is not None:
        decay = _log_decay(decay, a_log, dt_bias, gate_activation, gate_lower_bound, decay.ndim == len(lead) + 2)
    if beta is not None and beta_activation == "sigmoid":
        beta = mx.sigmoid(beta.astype(mx.float32))
    decay, beta = terms_of_rule(update_rule, decay, beta)
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    batch = _sequence_count(lead, bounds, initial_state)
    count = math.prod(lead)

    def rows(x: mx.array, width: int) -> mx.array:
        """Returns x as float32 [batch, heads, seq, width]; with bounds, batch is 1 and seq all sequences' tokens."""
        parts = x.astype(mx.float32).reshape(1 if bounds else batch, -1, x.size // (count * width), width)
        return repeat_heads(parts.transpose(0, 2, 1, 3), heads)

    q, k = rows(query, query.shape[-1]), rows(key, key.shape[-1])
    if qk_l2_norm:
        q, k = (x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    tokens = RecurrenceInputs(
        q,
        k,
        rows(value, value.shape[-1]),
        None if decay is None else rows(decay, decay.size // (count * heads)),
        None if beta is None else rows(beta, 1),
    )
    if initial_state is None:
        state = mx.zeros((batch, heads, key.shape[-1], value.shape[-1]))
    else:
        state = initial_state.astype(mx.float32).swapaxes(-1, -2)
    scale = scale or 1 / math.sqrt(query.shape[-1])
    if bounds is None:
        y, state = linear_recurrence(tokens, state, scale)
    else:
        runs = [
            linear_recurrence(tokens.slice(begin, end), state[row : row + 1], scale)
            for row, (begin, end) in enumerate(pairwise(bounds))
        ]
        y, state = mx.concatenate([run[0] for run in runs], axis=2), mx.concatenate([run[1] for run in runs], axis=0)
    y = y.transpose(0, 2, 1, 3).reshape(*lead, heads, value.shape[-1]).astype(query.dtype)
    return y, state.swapaxes(-1, -2)


def _sequence_count(lead: tuple[int, ...], bounds: list[int] | None, state: mx.array | None) -> int:
    """Returns the number of sequences; lead: the sizes of the axes before the heads."""
    if bounds:
        return len(bounds) - 1
    if len(lead) == 2:
        return lead[0]
    return 1 if state is None else state.shape[0]


def _split_packed_qkv(packed: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """Returns query, key and value from [tokens, 2 · heads · dim + value heads · v dim], of the sizes in the state."""
    if state is None:
        raise OperatorError("query, key and value packed, and no initial_state", "the state, which gives their sizes")
    heads, v_dim, dim = state.shape[1:]
    width = (packed.shape[-1] - heads * v_dim) // 2
    q, k, v = mx.split(packed, [width, 2 * width], axis=-1)
    lead = packed.shape[:-1]
    return q.reshape(*lead, -1, dim), k.reshape(*lead, -1, dim), v.reshape(*lead, heads, v_dim)


def _log_decay(decay, a_log, dt_bias, activation: str, lower_bound: float, by_channel: bool) -> mx.array:
    """Returns the log of the decay for a projection [..., heads], or by channel [..., heads, dim]: float32."""
    decay = decay.astype(mx.float32)
    if activation == "none":
        return decay
    rate = mx.exp(a_log)[:, None] if by_channel else mx.exp(a_log)
    if dt_bias is not None:
        decay = decay + dt_bias.reshape(-1, decay.shape[-1]) if by_channel else decay + dt_bias.reshape(-1)
    if activation in ("softplus", "qwen"):
        return -rate * mx.logaddexp(decay, 0.0)
    if activation in ("sigmoid", "kda"):
        return lower_bound * mx.sigmoid(rate * decay)
    raise OperatorError(f"the gate activation {activation!r}", "none, softplus or sigmoid")
