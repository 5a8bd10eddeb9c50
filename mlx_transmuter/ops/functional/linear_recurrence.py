"""The recurrence of linear attention: a state that each token decays, reads and writes, run in chunks.

Within a chunk all tokens go at once, by matrix products; from one to the next goes the state. Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length" and "Gated Delta Networks".
"""

from typing import NamedTuple

import mlx.core as mx

CHUNK_SIZE = 64
# A decay of its own for each channel needs its differences written out: chunk² · channels numbers.
CHANNEL_DECAY_CHUNK_SIZE = 16


class RecurrenceInputs(NamedTuple):
    """What the tokens bring, all float32 [batch, heads, seq, …]: q and k of dim, v of v dim.

    decay: log α, 1 or dim, None for no decay; beta: 1, how much of v_t the state is to hold, None to add all of it.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    decay: mx.array | None
    beta: mx.array | None

    def slice(self, begin: int, end: int) -> "RecurrenceInputs":
        """The tokens from begin to end."""
        return RecurrenceInputs(
            self.q[:, :, begin:end],
            self.k[:, :, begin:end],
            self.v[:, :, begin:end],
            None if self.decay is None else self.decay[:, :, begin:end],
            None if self.beta is None else self.beta[:, :, begin:end],
        )


def linear_recurrence(inputs: RecurrenceInputs, state: mx.array, scale: float) -> tuple[mx.array, mx.array]:
    """o_t = scale · S_tᵀ q_t with S_t = α_t S_{t-1} + k_t u_tᵀ, [batch, heads, seq, v dim]; and the last state.

    state: S_0, [batch, heads, dim, v dim]. u_t is v_t without beta; with it, the part of v_t that the state does not
    hold yet: beta_t (v_t - (α_t S_{t-1})ᵀ k_t).
    """
    seq = inputs.k.shape[2]
    chunk = CHUNK_SIZE if inputs.decay is None or inputs.decay.shape[-1] == 1 else CHANNEL_DECAY_CHUNK_SIZE
    outputs = []
    for begin in range(0, seq, chunk):
        y, state = _run_chunk(inputs.slice(begin, begin + chunk), state)
        outputs.append(y)
    return scale * (mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]), state


def _run_chunk(tokens: RecurrenceInputs, state: mx.array) -> tuple[mx.array, mx.array]:
    q, k, v, decay, beta = tokens
    seq = k.shape[2]
    # The log of the decay since the chunk's start; its differences never grow, so that no ratio overflows.
    total = mx.zeros((1, 1, seq, 1)) if decay is None else mx.cumsum(decay, axis=2)
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
        held = mx.where(mx.tril(mx.ones((seq, seq), dtype=mx.bool_), k=-1), beta * products(k), 0.0)
        u = _unit_lower_inverse(held) @ (beta * (v - (grown * k) @ state))
    y = (grown * q) @ state + products(q) @ u
    left = mx.exp(total[:, :, -1:] - total)  # the decay from each token to the chunk's end
    state = grown[:, :, -1:].swapaxes(-1, -2) * state + (left * k).swapaxes(-1, -2) @ u
    return y, state


def _unit_lower_inverse(lower: mx.array) -> mx.array:
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
