"""The inputs of a decoder that runs once over whole rows, without generation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.program import ProgramError
from mlx_transmuter.program.signature import (
    CACHE_INDEX_INPUT,
    HEAD_INDEX_INPUT,
    LOGIT_INDICES_INPUT,
    DecoderSignature,
    SignatureError,
)


def prompt_inputs(model: Any, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inputs beside the tokens of one step of the model's decoder over batch_size rows of length tokens.

    The cache is empty, each row has the positions from 0, and all tokens count, those of padding after a text too: the
    decoder is causal, so a text does not see them. Returns the inputs of a call and those that the host must know
    (use_cache_branch). A model that is no decoder with a cache has neither: ({}, {}); one without a cache that computes
    the logits of chosen tokens alone is told all of them.
    """
    module = getattr(model, "decoder", model)
    try:
        signature = DecoderSignature.from_program(module.program)
    except (SignatureError, ProgramError):
        return {}, {}
    places = mx.broadcast_to(mx.arange(length, dtype=mx.int32), (batch_size, length))
    if not signature.pairs:
        return ({LOGIT_INDICES_INPUT: places} if signature.selects_logits else {}), {}
    declared = {value.name: value for value in module.program.inputs}
    found: dict[str, Any] = {}
    static: dict[str, np.ndarray] = {}
    if signature.mask_input:
        found[signature.mask_input] = mx.ones(
            (batch_size, length), ops.device_dtype(declared[signature.mask_input].dtype)
        )
    if signature.positions_input:
        axes = signature.position_axes
        found[signature.positions_input] = mx.broadcast_to(places, (axes, batch_size, length)) if axes else places
    if signature.use_cache_branch_input:
        static[signature.use_cache_branch_input] = np.array([False])
    if signature.logits_to_keep_input:
        static[signature.logits_to_keep_input] = np.zeros(signature.logits_to_keep_shape, np.int64)
    if signature.selects_logits:
        found[LOGIT_INDICES_INPUT] = places
    if signature.uses_pools:
        heads = signature.cache_pairs[0].heads
        found |= {
            CACHE_INDEX_INPUT: CacheIndex.whole(batch_size, length),
            HEAD_INDEX_INPUT: CacheIndex.whole(batch_size * heads, length),
        }
    for entry in signature.cache_pairs:
        # A whole index neither reads nor writes the pools.
        shape = (entry.heads, entry.head_dim) if signature.uses_pools else entry.shape_for(batch_size, 0)
        found[entry.past] = mx.zeros(shape, ops.device_dtype(entry.dtype))
    for state in signature.state_pairs:
        found[state.past] = mx.zeros(state.shape_for(batch_size), ops.device_dtype(state.dtype))
    return found, static
