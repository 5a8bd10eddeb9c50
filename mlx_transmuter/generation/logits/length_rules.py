"""min_length, min_new_tokens and exponential_decay_length_penalty of transformers 4.57.6: when a row may end."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.processor_types import (
    LogitsProcessor,
    evaluated_token_mask,
    removing_processor,
)
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE


def min_length(minimum: int, eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes the eos tokens from rows of fewer than `minimum` tokens, prompt included. MinLengthLogitsProcessor."""
    tokens = evaluated_token_mask(eos, vocab_size)
    return removing_processor(tokens, ("length",), lambda state: state["length"] < minimum)


def min_new_tokens(minimum: int, eos: Sequence[int], vocab_size: int) -> LogitsProcessor:
    """Removes the eos tokens from rows of fewer than `minimum` new tokens. MinNewTokensLengthLogitsProcessor."""
    tokens = evaluated_token_mask(eos, vocab_size)
    return removing_processor(
        tokens, ("length", "prompt_length"), lambda state: state["length"] - state["prompt_length"] < minimum
    )


def exponential_decay_length_penalty(
    penalty: tuple[int, float], eos: Sequence[int], vocab_size: int, *, under_beams: bool
) -> LogitsProcessor:
    """Adds |score| · (factor^n - 1) to the eos tokens, n new tokens after start. ExponentialDecayLengthPenalty.

    The score of an eos that is removed would be -inf + inf, NaN, which argmax takes for the best in transformers: it is
    +inf here, on devices whose argmax passes over NaN too. Under beams the eos stays removed.
    """
    start, factor = penalty
    score_of_removed = REMOVED_SCORE if under_beams else -REMOVED_SCORE
    tokens = evaluated_token_mask(eos, vocab_size)

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        late = (state["length"] - state["prompt_length"] - start).astype(mx.float32)[:, None]
        # The power of the factor's magnitude: a device's power of a negative number is NaN.
        power = mx.power(abs(factor), mx.maximum(late, 0.0))
        if factor < 0:
            power = mx.where(late.astype(mx.int32) % 2 == 1, -power, power)
        raised = mx.where(scores == REMOVED_SCORE, score_of_removed, scores + mx.abs(scores) * (power - 1))
        return mx.where((late > 0) & tokens, raised, scores)

    return LogitsProcessor(("length", "prompt_length"), process)
