"""The types of the logits processors: a function of scores and of the rows' state, with the state that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_transmuter.generation.logits.processor_state import ProcessorState, token_mask
from mlx_transmuter.generation.logits.scores import REMOVED_SCORE

# A task's own processor: make_state(dict(prompt, generated, vocab)) -> array of one shape at every step, and
# process(logits of one row, that array) -> logits. `generated` has the last token first.
CustomProcessor = tuple[Callable[[Mapping[str, Any]], Any], Callable[[mx.array, mx.array], mx.array]]

# Which rows a processor applies to: bool [rows] of their state.
RowCondition = Callable[[ProcessorState], mx.array]


class LogitsProcessor(NamedTuple):
    """A function of scores float32 [rows, vocab] and of the state of the rows, and the names of the state it reads."""

    state_names: tuple[str, ...]
    process: Callable[[mx.array, ProcessorState], mx.array]


def removing_processor(tokens: mx.array, state_names: tuple[str, ...], condition: RowCondition) -> LogitsProcessor:
    """Returns a processor that removes tokens, bool [1, vocab], from the rows for which the condition is true."""

    def process(scores: mx.array, state: ProcessorState) -> mx.array:
        return mx.where(condition(state)[:, None] & tokens, REMOVED_SCORE, scores)

    return LogitsProcessor(state_names, process)


def evaluated_token_mask(tokens: Sequence[int], vocab_size: int) -> mx.array:
    """Returns bool [1, vocab], evaluated: a compiled selection would recompute a lazy constant at each step."""
    mask = token_mask([tokens], vocab_size)
    mx.eval(mask)
    return mask
