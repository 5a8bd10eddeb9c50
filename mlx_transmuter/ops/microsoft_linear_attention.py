"""Linear attention of com.microsoft: a state of fixed size in place of a cache, as Gated DeltaNet and RetNet have it.

The recurrence runs in chunks: within one, all tokens at once by matrix products; from one to the next, the state.
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule" and "Gated Delta Networks".
"""

import math
from itertools import pairwise

import mlx.core as mx

from mlx_transmuter.ops.registry import Host, OperatorError, op

CHUNK = 64
# A decay of its own for each channel needs its differences written out: chunk² · channels numbers.
CHUNK_BY_CHANNEL = 16
_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


def recurrence(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    state: mx.array,
    decay: mx.array | None,
    beta: mx.array | None,
    scale: float,
) -> tuple[mx.array, mx.array]:
    """o_t = scale · q_tᵀ S_t with S_t = α_t S_{t-1} + k_t u_tᵀ, and the last state; all float32.

    q, k: [batch, heads, seq, dim]; v: [batch, heads, seq, v dim]; state: [batch, heads, dim, v dim]; decay, log α:
    [batch, heads, seq, 1 or dim] or None for none. u_t is v_t without beta, [batch, heads, seq, 1], and with it the
    part of v_t that the state does not hold yet: beta_t (v_t - (α_t S_{t-1})ᵀ k_t).
    """
    seq = k.shape[2]
    chunk = CHUNK if decay is None or decay.shape[-1] == 1 else CHUNK_BY_CHANNEL
    outputs = []
    for first in range(0, seq, chunk):

        def part(x: mx.array, first: int = first) -> mx.array:
            return x[:, :, first : first + chunk]

        y, state = _chunk(
            part(q),
            part(k),
            part(v),
            state,
            None if decay is None else part(decay),
            None if beta is None else part(beta),
        )
        outputs.append(y)
    return scale * (mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]), state


def _chunk(q, k, v, state, decay, beta) -> tuple[mx.array, mx.array]:
    seq = k.shape[2]
    total = (
        mx.zeros((1, 1, seq, 1)) if decay is None else mx.cumsum(decay, axis=2)
    )  # log of the decay since the chunk's start
    grown = mx.exp(total)
    within = mx.tril(mx.ones((seq, seq), dtype=mx.bool_))

    def products(a: mx.array) -> mx.array:
        """a_tᵀ (α_{s+1} … α_t) k_s for s ≤ t, else 0: [batch, heads, seq, seq]."""
        if total.shape[-1] == 1:
            between = mx.where(within, total - total.swapaxes(-1, -2), -mx.inf)
            return (a @ k.swapaxes(-1, -2)) * mx.exp(between)
        between = mx.where(within[..., None], total[:, :, :, None] - total[:, :, None], -mx.inf)
        return mx.sum(a[:, :, :, None] * mx.exp(between) * k[:, :, None], axis=-1)

    u = v
    if beta is not None:
        held = beta * products(k)
        held = mx.where(mx.tril(mx.ones((seq, seq), dtype=mx.bool_), k=-1), held, 0.0)
        u = _inverse(held) @ (beta * (v - (grown * k) @ state))
    y = (grown * q) @ state + products(q) @ u
    left = mx.exp(total[:, :, -1:] - total)  # the decay from each token to the chunk's end
    state = grown[:, :, -1:].swapaxes(-1, -2) * state + (left * k).swapaxes(-1, -2) @ u
    return y, state


def _inverse(lower: mx.array) -> mx.array:
    """The inverse of 1 + lower, strictly lower triangular [..., n, n]: by substitution over blocks of 1, 2, 4, ….

    A power series needs as few products, but its terms grow as binomials where keys are alike.
    """
    n = lower.shape[-1]
    size = 1 << (n - 1).bit_length()
    if size > n:
        lower = mx.pad(lower, [(0, 0)] * (lower.ndim - 2) + [(0, size - n)] * 2)
    batch = lower.shape[:-2]
    inverse = mx.ones((*batch, size, 1, 1), dtype=lower.dtype)
    block = 1
    while block < size:
        pairs = size // (2 * block)
        blocks = lower.reshape(*batch, pairs, 2 * block, pairs, 2 * block)
        blocks = mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        upper, under = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(under @ blocks[..., block:, :block] @ upper)
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, under], axis=-1)], axis=-2)
        block *= 2
    return inverse.reshape(*batch, size, size)[..., :n, :n]


def _by_head(x: mx.array, heads: int) -> mx.array:
    """x [batch, seq, heads · dim] as float32 [batch, heads, seq, dim]."""
    batch, seq, hidden = x.shape
    return x.astype(mx.float32).reshape(batch, seq, heads, hidden // heads).transpose(0, 2, 1, 3)


def _shared(x: mx.array, heads: int) -> mx.array:
    """x [batch, fewer heads, seq, dim] with each head repeated for the heads that share it."""
    return x if x.shape[1] == heads else mx.repeat(x, heads // x.shape[1], axis=1)


def _terms(rule: str, decay: mx.array | None, beta: mx.array | None) -> tuple[mx.array | None, mx.array | None]:
    """decay and beta where the rule has them. Raises OperatorError for a rule unknown or without its terms."""
    if rule not in _RULES:
        raise OperatorError(f"the update rule {rule!r}", f"one of {', '.join(_RULES)}")
    gated, delta = _RULES[rule]
    if (gated and decay is None) or (delta and beta is None):
        raise OperatorError(f"the update rule {rule!r} without its decay or beta", "both where the rule has them")
    return decay if gated else None, beta if delta else None


def _windowed(state: mx.array | None, window: int) -> mx.array | None:
    """The state to go on from: that of the last slot, where there are slots."""
    return state[-1] if window and state is not None else state


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
    """Attention over a state S [batch, kv heads, dim, v dim] that each token decays and writes to; and the last state.

    query: [batch, seq, heads · dim]; key: [batch, seq, kv heads · dim]; value: [batch, seq, kv heads · v dim]; decay,
    log: [batch, seq, kv heads] or [batch, seq, kv heads · dim]; beta: [batch, seq, kv heads or 1]. The output has a
    head for each query head, or kv head where these are more. With state_window w the states are [w, batch, …]: those
    after the last w tokens, zeros where there are fewer. chunk_size changes nothing but speed elsewhere. com.microsoft
    LinearAttention-1.
    """
    heads = max(q_num_heads, kv_num_heads)
    batch, seq, _ = query.shape
    decay, beta = _terms(update_rule, decay, beta)
    q, k, v = _by_head(query, q_num_heads), _by_head(key, kv_num_heads), _by_head(value, kv_num_heads)
    state = _windowed(past_state, state_window)
    dtype = query.dtype if state is None else state.dtype
    if state is None:
        state = mx.zeros((batch, kv_num_heads, k.shape[-1], v.shape[-1]))
    group = heads // kv_num_heads
    if decay is not None:
        decay = _shared(_by_head(decay, kv_num_heads), heads)
    if beta is not None:
        beta = _shared(_by_head(beta, beta.shape[-1]), heads)
    y, states = _with_states(
        _shared(q, heads),
        _shared(k, heads),
        _shared(v, heads),
        _shared(state.astype(mx.float32), heads),
        decay,
        beta,
        scale or 1 / math.sqrt(q.shape[-1]),
        state_window,
    )
    present = states[..., ::group, :, :].astype(dtype)
    y = y.transpose(0, 2, 1, 3).reshape(batch, seq, -1).astype(query.dtype)
    return y, present if state_window else present[0]


def _with_states(q, k, v, state, decay, beta, scale: float, window: int) -> tuple[mx.array, mx.array]:
    """recurrence's output, and the states after the last tokens, at least 1: [window, batch, heads, dim, v dim]."""
    seq, window = k.shape[2], max(window, 1)
    first = max(seq - window + 1, 1)  # up to here in chunks, then token by token
    bounds = [0, *range(first, seq + 1)]
    outputs, states = [], [mx.zeros_like(state)] * max(window - seq, 0)
    for begin, end in pairwise(bounds):
        cut = [None if x is None else x[:, :, begin:end] for x in (q, k, v, decay, beta)]
        y, state = recurrence(cut[0], cut[1], cut[2], state, cut[3], cut[4], scale)
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
    cu_seqlens: Host = None,
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

    query, key: heads of dim; value: a multiple of the heads, of v dim; or all packed in query. decay, beta: a number a
    head and token, or a channel's each. The states are turned: float32 [batch, value heads, v dim, dim]. cu_seqlens:
    where the sequences in one row begin and end, [batch + 1]; else they are of one length. gate_activation: "softplus"
    for -exp(a_log) · softplus(decay + dt_bias), "sigmoid" for gate_lower_bound · sigmoid(exp(a_log) · (decay +
    dt_bias)). com.microsoft GatedDeltaNet-1.
    """
    if state_update_capacity:
        raise OperatorError("state_update_capacity", "0: transitions are for engines that draft tokens")
    if key is None:
        query, key, value = _unpacked(query, initial_state)
    dtype, lead = query.dtype, query.shape[:-2]
    heads = value.shape[-2]
    if decay is not None:
        decay = _effective_decay(decay, a_log, dt_bias, gate_activation, gate_lower_bound, decay.ndim == len(lead) + 2)
    if beta is not None and beta_activation == "sigmoid":
        beta = mx.sigmoid(beta.astype(mx.float32))
    decay, beta = _terms(update_rule, decay, beta)
    lengths = None if cu_seqlens is None else cu_seqlens.tolist()
    batch = 1 if lengths else (lead[0] if len(lead) == 2 else 1 if initial_state is None else initial_state.shape[0])

    def rows(x: mx.array, width: int) -> mx.array:
        """x as float32 [batch, heads, seq, width]."""
        parts = x.astype(mx.float32).reshape(batch, -1, x.size // (math.prod(lead) * width), width)
        return parts.transpose(0, 2, 1, 3)

    q, k, v = rows(query, query.shape[-1]), rows(key, key.shape[-1]), rows(value, value.shape[-1])
    if qk_l2_norm:
        q, k = (x * mx.rsqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = _shared(q, heads), _shared(k, heads)
    decay = None if decay is None else rows(decay, max(decay.size // (math.prod(lead) * heads), 1))
    beta = None if beta is None else rows(beta, 1)
    if initial_state is None:
        state = mx.zeros((batch, heads, k.shape[-1], v.shape[-1]))
    else:
        state = initial_state.astype(mx.float32).swapaxes(-1, -2)
    scale = scale or 1 / math.sqrt(q.shape[-1])
    if lengths is None:
        y, state = recurrence(q, k, v, state, decay, beta, scale)
    else:
        runs = []
        for row, (begin, end) in enumerate(pairwise(lengths)):
            cut = [None if x is None else x[:, :, begin:end] for x in (q, k, v, decay, beta)]
            runs.append(recurrence(cut[0], cut[1], cut[2], state[row : row + 1], cut[3], cut[4], scale))
        y, state = mx.concatenate([run[0] for run in runs], axis=2), mx.concatenate([run[1] for run in runs], axis=0)
    y = y.transpose(0, 2, 1, 3).reshape(*lead, heads, value.shape[-1]).astype(dtype)
    return y, state.swapaxes(-1, -2)


def _unpacked(packed: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array, mx.array]:
    """query, key and value out of [tokens, 2 · heads · dim + value heads · v dim], the sizes being the state's."""
    if state is None:
        raise OperatorError("query, key and value packed, and no initial_state", "the state, which gives their sizes")
    heads, v_dim, dim = state.shape[1:]
    width = (packed.shape[-1] - heads * v_dim) // 2
    q, k, v = mx.split(packed, [width, 2 * width], axis=-1)
    lead = packed.shape[:-1]
    return q.reshape(*lead, -1, dim), k.reshape(*lead, -1, dim), v.reshape(*lead, heads, v_dim)


def _effective_decay(decay, a_log, dt_bias, activation: str, lower_bound: float, by_channel: bool) -> mx.array:
    """The log of the decay that a projection [..., heads], or by channel [..., heads, dim], stands for: float32."""
    decay = decay.astype(mx.float32)
    if activation == "none":
        return decay
    rate = mx.exp(a_log)[:, None] if by_channel else mx.exp(a_log)
    moved = (
        decay
        if dt_bias is None
        else decay + (dt_bias.reshape(-1, decay.shape[-1]) if by_channel else dt_bias.reshape(-1))
    )
    if activation in ("softplus", "qwen"):
        return -rate * mx.logaddexp(moved, 0.0)
    if activation in ("sigmoid", "kda"):
        return lower_bound * mx.sigmoid(rate * moved)
    raise OperatorError(f"the gate activation {activation!r}", "none, softplus or sigmoid")
