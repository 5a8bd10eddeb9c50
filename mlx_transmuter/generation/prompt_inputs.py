"""The inputs of a decoder that runs once over whole rows, without generation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.program import ProgramError
from mlx_transmuter.program.signature import LOGIT_INDICES_INPUT, SignatureError
from mlx_transmuter.runtime.step_inputs import StepInputs


def prompt_inputs(model: Any, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the inputs beside the tokens of one step of the model's decoder over batch_size rows of length tokens.

    The cache is empty, each row has the positions from 0, and the mask counts every token, padding after a text too:
    the decoder is causal, so a text does not see it. The first dict has the `mx.array` inputs of a call, with indices
    of all tokens for a decoder that computes chosen logits; the second those that must be numpy arrays
    (use_cache_branch). A decoder without a cache needs nothing but those indices; a model that is no decoder has
    neither: ({}, {}).
    """
    module = getattr(model, "decoder", model)
    try:
        step_inputs = StepInputs.from_program(module.program)
    except (SignatureError, ProgramError):
        return {}, {}
    signature = step_inputs.signature
    all_tokens = mx.broadcast_to(mx.arange(length, dtype=mx.int32), (batch_size, length))
    if not signature.pairs:
        return ({LOGIT_INDICES_INPUT: all_tokens} if signature.selects_logits else {}), {}
    if signature.uses_pools:
        past = step_inputs.uncached_pools(batch_size, length) | step_inputs.zero_states(batch_size)
    else:
        past = step_inputs.empty_past(batch_size)
    tokens, host_inputs = step_inputs.zero_tokens(batch_size, length), step_inputs.host_inputs(0)
    feed = step_inputs.uniform(tokens=tokens, past_length=0, past=past, logit_indices=all_tokens)
    callers = {signature.token_input, *host_inputs}
    return {name: value for name, value in feed.items() if name not in callers}, host_inputs
