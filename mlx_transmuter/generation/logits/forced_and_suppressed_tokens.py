"""forced_bos_token_id, forced_eos_token_id, suppress_tokens and begin_suppress_tokens of transformers 4.57.6."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.processor_types import (
    LogitsProcessor,
    RowCondition,
    evaluated_token_mask,
    removing_processor,
)
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE


def forced_bos_token_id(token: int, vocab_size: int) -> LogitsProcessor:
    """Leaves only token, with a score of 0, in rows of one token. ForcedBOSTokenLogitsProcessor."""
    return _forcing_processor([token], vocab_size, ("length",), lambda state: state["length"] == 1)


def forced_eos_token_id(tokens: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Leaves only tokens, with a score of 0, in rows of max_length - 1 tokens. ForcedEOSTokenLogitsProcessor."""
    return _forcing_processor(
        tokens, vocab_size, ("length", "max_length"), lambda state: state["length"] == state["max_length"] - 1
    )


def suppress_tokens(tokens: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes tokens at every step. SuppressTokensLogitsProcessor."""
    suppressed = evaluated_token_mask(tokens, vocab_size)
    return LogitsProcessor((), lambda scores, state: mx.where(suppressed, REMOVED_SCORE, scores))


def begin_suppress_tokens(tokens: Sequence[int], after_forced_bos: bool, vocab_size: int) -> LogitsProcessor:
    """Removes tokens at the first new token, or at the second after a forced one of a prompt of one token.
    SuppressTokensAtBeginLogitsProcessor."""
    suppressed = evaluated_token_mask(tokens, vocab_size)

    def begins(state: ProcessorState) -> mx.array:
        start = state["prompt_length"]
        return state["length"] == (mx.where(start > 1, start, start + 1) if after_forced_bos else start)

    return removing_processor(suppressed, ("length", "prompt_length"), begins)


def _forcing_processor(
    tokens: Sequence[int], vocab_size: int, state_names: tuple[str, ...], condition: RowCondition
) -> LogitsProcessor:
    forced = mx.where(evaluated_token_mask(tokens, vocab_size), 0.0, REMOVED_SCORE)
    mx.eval(forced)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.where(condition(state)[:, None], forced, scores)

    return LogitsProcessor(state_names, process)
