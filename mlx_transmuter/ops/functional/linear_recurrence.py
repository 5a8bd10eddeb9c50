"""The recurrence of linear attention: a state that each token decays, reads and writes, computed in chunks.

The tokens of a chunk are computed together by matrix products; the state is carried from chunk to chunk. Yang et al.
2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" and "Gated Delta Networks".
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.functional.heads import repeat_heads, split_heads
from mlx_transmuter.ops.registry import OperatorError

CHUNK_SIZE = 64
# A decay per channel needs the differences of all pairs of tokens: chunk² · channels numbers.
CHANNEL_DECAY_CHUNK_SIZE = 16


class RecurrenceInputs(NamedTuple):
    """The terms of each token, all float32 [batch, heads, seq, width]: q and k of width dim, v of width v dim.

    decay: log α, of width 1 or dim, None for no decay; beta: of width 1, the share of v_t that the state is to hold,
    None to add all of v_t.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array | None
    beta: mx.array | None

    def slice(self, begin: int, end: int) -> "RecurrenceInputs":
        """Returns the tokens from begin to end."""
        return RecurrenceInputs(
            self.q[:, :, begin:end],
            self.k[:, :, begin:end],
            self.v[:, :, begin:end],
            None if self.decay is None else self.decay[:, :, begin:end],
            None if self.beta is None else self.beta[:, :, begin:end],
        )


# Update rule -> whether it decays the state, and whether it writes only what the state does not hold yet.
UPDATE_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


def terms_of_rule(rule: str, decay: mx.array | None, beta: mx.array | None) -> tuple[mx.array | None, mx.array | None]:
    """Returns decay and beta, each where the update rule has it, else None.

    Raises OperatorError for an unknown rule and for a rule without one of its terms.
    """
    if rule not in UPDATE_RULES:
        raise OperatorError(f"the update rule {rule!r}", f"one of {', '.join(UPDATE_RULES)}")
    has_decay, has_beta = UPDATE_RULES[rule]
    if (has_decay and decay is None) or (has_beta and beta is None):
        raise OperatorError(f"the update rule {rule!r} without its decay or beta", "both where the rule has them")
    return decay if has_decay else None, beta if has_beta else None


def recurrence_inputs(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    decay: mx.array | None,
    beta: mx.array | None,
    *,
    q_heads: int,
    kv_heads: int,
) -> RecurrenceInputs:
    """Returns tokens [batch, seq, heads · width] split into as many heads as the larger of q_heads and kv_heads.

    query: [..., q_heads · dim]; key: [..., kv_heads · dim]; value: [..., kv_heads · v dim]; decay, log α: [...,
    kv_heads] or [..., kv_heads · dim]; beta: [..., kv_heads or 1].
    """
    heads = max(q_heads, kv_heads)

    def split(x: mx.array, own_heads: int) -> mx.array:
        return repeat_heads(split_heads(x.astype(mx.float32), own_heads), heads)

    return RecurrenceInputs(
        split(query, q_heads),
        split(key, kv_heads),
        split(value, kv_heads),
        None if decay is None else split(decay, kv_heads),
        None if beta is None else split(beta, beta.shape[-1]),
    )


def linear_recurrence(inputs: RecurrenceInputs, state: mx.array, scale: float) -> tuple[mx.array, mx.array]:
    """Returns o_t = scale · S_tᵀ q_t, [batch, heads, seq, v dim], where S_t = α_t S_{t-1} + k_t u_tᵀ; and the last S.

    state: S_0, [batch, heads, dim, v dim]. Without beta u_t is v_t; with it, the part of v_t that the state does not
    hold yet: beta_t (v_t - (α_t S_{t-1})ᵀ k_t).
    """
    seq = inputs.k.shape[2]
    chunk = CHUNK_SIZE if inputs.decay is None or inputs.decay.shape[-1] == 1 else CHANNEL_DECAY_CHUNK_SIZE
    outputs = []
    for begin in range(0, seq, chunk):
        y, state = _run_chunk(inputs.slice(begin, begin + chunk), state)
        outputs.append(y)
    return scale * (mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]), state


def linear_recurrence_by_token(inputs: RecurrenceInputs, state: mx.array, scale: float) -> tuple[mx.array, mx.array]:
    """Returns what `linear_recurrence` does, one token after the other: slower, and exact for any decay.

    A chunk takes the logs of decays as differences of their sums, which lose the small ones beside one far below 0.
    """
    outputs = []
    for t in range(inputs.k.shape[2]):
        q, k, v = (x[:, :, t] for x in (inputs.q, inputs.k, inputs.v))
        if inputs.decay is not None:
            state = state * mx.exp(inputs.decay[:, :, t])[..., None]
        if inputs.beta is not None:
            v = inputs.beta[:, :, t] * (v - mx.sum(state * k[..., None], axis=2))
        state = state + k[..., None] * v[:, :, None]
        outputs.append(scale * mx.sum(state * q[..., None], axis=2))
    return mx.stack(outputs, axis=2), state


def _run_chunk(tokens: RecurrenceInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    q, k, v, decay, beta = tokens
    seq = k.shape[2]
    # The log of the decay since the chunk's start. Only exponentials of its differences from earlier to later tokens
    # are taken, which are at most 1, so that none overflows.
    log_decay = mx.zeros((1, 1, seq, 1)) if decay is None else mx.cumsum(decay, axis=2)
    decay_from_start = mx.exp(log_decay)
    is_past = mx.tril(mx.ones((seq, seq), dtype=mx.bool_))

    def products(a: mx.array) -> mx.array:
        """Returns a_tᵀ (α_{s+1} … α_t) k_s for s ≤ t, else 0: [batch, heads, seq, seq]."""
        if log_decay.shape[-1] == 1:
            between = mx.where(is_past, log_decay - log_decay.swapaxes(-1, -2), -mx.inf)
            return (a @ k.swapaxes(-1, -2)) * mx.exp(between)
        between = mx.where(is_past[..., None], log_decay[:, :, :, None] - log_decay[:, :, None], -mx.inf)
        return mx.sum(a[:, :, :, None] * mx.exp(between) * k[:, :, None], axis=-1)

    u = v
    if beta is not None:
        overlap = mx.where(mx.tril(mx.ones((seq, seq), dtype=mx.bool_), k=-1), beta * products(k), 0.0)
        u = _unit_lower_inverse(overlap) @ (beta * (v - (decay_from_start * k) @ state))
    y = (decay_from_start * q) @ state + products(q) @ u
    decay_to_end = mx.exp(log_decay[:, :, -1:] - log_decay)
    state = decay_from_start[:, :, -1:].swapaxes(-1, -2) * state + (decay_to_end * k).swapaxes(-1, -2) @ u
    return y, state


def _unit_lower_inverse(lower: mx.array) -> mx.array:
    """Returns the inverse of 1 + lower, strictly lower triangular [..., n, n].

    It is computed by substitution over blocks of 1, 2, 4, …. A power series needs as few products, but its terms grow
    like binomial coefficients where keys are similar.
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
