"""repetition_penalty, encoder_repetition_penalty and the two no_repeat_ngram_size settings of transformers 4.57.6."""

from __future__ import annotations

import mlx.core as mx

from mlx_transmuter.generation.logits.processor_state import ProcessorState, mask_from_ids
from mlx_transmuter.generation.logits.processor_types import LogitsProcessor
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE


def repetition_penalty(penalty: float) -> LogitsProcessor:
    """Divides the positive and multiplies the negative scores of the row's tokens by penalty, once per token."""
    return LogitsProcessor(("seen_tokens",), lambda scores, state: _penalize(scores, state["seen_tokens"], penalty))


def encoder_repetition_penalty(penalty: float, rows_per_prompt: int) -> LogitsProcessor:
    """Applies the inverse penalty to the tokens of the encoder or prompt, in the first row of each prompt.

    transformers gathers and scatters by ids that it does not repeat for beams or for several sequences of a prompt, so
    a prompt alone changes only in its first row; this does the same.
    """

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        is_first = mx.arange(scores.shape[0])[:, None] % rows_per_prompt == 0
        return _penalize(scores, state["encoder_tokens"] & is_first, 1 / penalty)

    return LogitsProcessor(("encoder_tokens",), process)


def remove_seen_tokens(state_name: str) -> LogitsProcessor:
    """Removes the tokens of a state bool [rows, vocab]: the bans of n-grams of one token."""
    return LogitsProcessor((state_name,), lambda scores, state: mx.where(state[state_name], REMOVED_SCORE, scores))


def remove_banned_ids() -> LogitsProcessor:
    """Removes the ids that would repeat an n-gram of several tokens, which the host finds (see NgramBans)."""

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.where(mask_from_ids(state["banned_ids"], scores.shape[-1]), REMOVED_SCORE, scores)

    return LogitsProcessor(("banned_ids",), process)


def _penalize(scores: mx.array, tokens: mx.array, penalty: float) -> mx.array:
    return mx.where(tokens, mx.where(scores < 0, scores * penalty, scores / penalty), scores)
