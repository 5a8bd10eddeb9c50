"""Observation: what the values of a decoder are over several sizes of a step, found by walking it without computing
anything.

A shape or an axis that a graph computes in ten nodes is one value on the host. Seen over steps of different sizes it
shows whether it is a constant, and a reshape whether it changes anything. Nothing on the device is evaluated and no
weight is read, so an observation costs some milliseconds a layer. What rewrites conclude from it the proof of the
conversion tests again, on other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.module import Module, values_of
from mlx_transmuter.program import Program, Value
from mlx_transmuter.signature import ENDS, INDEX, LANES, Signature, SignatureError
from mlx_transmuter.steps import lanes

# (rows, past, seq): no size stands twice, no two sum to a third that a graph could confuse, and the extremes are in.
TRIALS = ((2, 7, 3), (1, 31, 5), (3, 21, 1), (5, 0, 11))


@dataclass(frozen=True)
class Observation:
    """signature, inputs: of the program seen. seen: for each trial, its values by name: numpy arrays, or unevaluated
    `mx.array`s.
    """

    signature: Signature
    inputs: tuple[Value, ...]
    seen: tuple[dict[str, Any], ...]

    @staticmethod
    def of(program: Program, before: Observation | None = None) -> Observation | None:
        """The observation of a decoder; None for a program that is none, that takes other inputs, or that cannot be
        walked.

        before: of the program that this one was made from by rewrites, which leave its values their names: only what is
        new is walked.
        """
        try:
            signature = Signature.of(program)
        except SignatureError:
            return None
        if signature.given or signature.branch:
            return None
        if before is not None and before.inputs != program.inputs:
            before = None
        zeros = {name: mx.zeros(w.shape, ops.device_dtype(w.dtype)) for name, w in program.weights.items()}
        module = Module(program, zeros)
        earlier = before.seen if before else [None] * len(TRIALS)
        try:
            seen = tuple(
                values_of(module, values, **step(program, signature, *trial))
                for trial, values in zip(TRIALS, earlier, strict=True)
            )
        except ops.OperatorError:
            # What a node may have on the host can hang on nodes that weren't walked again.
            return Observation.of(program) if before else None
        return Observation(signature, program.inputs, seen)

    def constant(self, name: str) -> np.ndarray | None:
        """The value, if it is on the host and the same in every trial."""
        first = self.seen[0].get(name)
        if not isinstance(first, np.ndarray):
            return None
        same = all(
            isinstance(value := one.get(name), np.ndarray)
            and value.dtype == first.dtype
            and np.array_equal(value, first)
            for one in self.seen[1:]
        )
        return first if same else None

    def shapes(self, name: str) -> list[tuple[int, ...]] | None:
        """The value's shape in each trial, or None for a value that is no array."""
        values = [one.get(name) for one in self.seen]
        if not all(isinstance(value, (np.ndarray, mx.array)) for value in values):
            return None
        return [tuple(value.shape) for value in values]  # type: ignore[union-attr]

    def dtype(self, name: str) -> str | None:
        """The name of MLX's type of the value on the device, or None for one on the host."""
        value = self.seen[0].get(name)
        return str(value.dtype).removeprefix("mlx.core.") if isinstance(value, mx.array) else None


def step(program: Program, signature: Signature, rows: int, past: int, seq: int) -> dict[str, Any]:
    """Inputs of those sizes for one step of the program: zeros, with a full mask; no past where nothing is carried."""
    past = past if signature.carried else 0
    inputs: dict[str, Any] = {
        entry.past: mx.zeros(entry.sizes(rows, past), ops.device_dtype(entry.dtype)) for entry in signature.entries
    }
    if signature.index:
        inputs |= _pools(signature, rows, past, seq)
    if signature.ends:
        inputs[ENDS] = mx.zeros((rows, 1), mx.int32)
    for state in signature.states:
        inputs[state.past] = mx.zeros(state.sizes(rows), ops.device_dtype(state.dtype))
    values = {value.name: value for value in program.inputs}
    shape, dtype = values[signature.tokens].shape, ops.device_dtype(values[signature.tokens].dtype)
    dim = (shape[-1],) if signature.embeds and shape and isinstance(shape[-1], int) else ()
    inputs[signature.tokens] = mx.zeros((rows, seq, *dim), dtype)
    if signature.mask:
        inputs[signature.mask] = mx.ones((rows, past + seq), ops.device_dtype(values[signature.mask].dtype))
    if signature.positions:
        axes = (signature.position_axes,) if signature.position_axes else ()
        inputs[signature.positions] = mx.broadcast_to(mx.arange(past, past + seq, dtype=mx.int32), (*axes, rows, seq))
    if signature.keep:
        inputs[signature.keep] = np.zeros(signature.keep_shape, np.int64)
    return inputs


def _pools(signature: Signature, rows: int, past: int, seq: int) -> dict[str, Any]:
    """What a program over pools takes besides: an index of rows, and pools with a spare row."""
    context, heads = past + seq, signature.entries[0].heads
    places = mx.broadcast_to(mx.arange(past, context, dtype=mx.int32), (rows, seq))
    index = CacheIndex.rows(context, [0] * rows).at(places)
    found: dict[str, Any] = {INDEX: index, LANES: lanes(signature, index, context, heads * rows * context + 1)}
    for entry in signature.entries:
        size = (entry.heads * rows * context + 1, entry.dim)
        found[entry.past] = mx.zeros(size, ops.device_dtype(entry.dtype))
    return found
