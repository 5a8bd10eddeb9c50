"""The inputs of a decoder that runs once over whole rows, without generation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.program import ProgramError
from mlx_transmuter.signature import ENDS, INDEX, LANES, Signature, SignatureError


def prompt_inputs(model: Any, batch_size: int, length: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The inputs beside the tokens of one step of the model's decoder over batch_size rows of length tokens.

    The cache is empty, each row has the positions from 0, and all tokens count, those of padding after a text too: the
    decoder is causal, so a text does not see them. Returns the inputs of a call and those that the host must know
    (use_cache_branch). A model that is no decoder with a cache has neither: ({}, {}); one without a cache that computes
    the logits of chosen tokens alone is told all of them.
    """
    module = getattr(model, "decoder", model)
    try:
        signature = Signature.of(module.program)
    except (SignatureError, ProgramError):
        return {}, {}
    places = mx.broadcast_to(mx.arange(length, dtype=mx.int32), (batch_size, length))
    if not signature.carried:
        return ({ENDS: places} if signature.ends else {}), {}
    declared = {value.name: value for value in module.program.inputs}
    found: dict[str, Any] = {}
    static: dict[str, np.ndarray] = {}
    if signature.mask:
        found[signature.mask] = mx.ones((batch_size, length), ops.device_dtype(declared[signature.mask].dtype))
    if signature.positions:
        axes = signature.position_axes
        found[signature.positions] = mx.broadcast_to(places, (axes, batch_size, length)) if axes else places
    if signature.branch:
        static[signature.branch] = np.array([False])
    if signature.keep:
        static[signature.keep] = np.zeros(signature.keep_shape, np.int64)
    if signature.ends:
        found[ENDS] = places
    if signature.index:
        heads = signature.entries[0].heads
        found |= {INDEX: CacheIndex.whole(batch_size, length), LANES: CacheIndex.whole(batch_size * heads, length)}
    for entry in signature.entries:
        # A whole index neither reads nor writes the pools.
        shape = (entry.heads, entry.dim) if signature.index else entry.sizes(batch_size, 0)
        found[entry.past] = mx.zeros(shape, ops.device_dtype(entry.dtype))
    for state in signature.states:
        found[state.past] = mx.zeros(state.sizes(batch_size), ops.device_dtype(state.dtype))
    return found, static
