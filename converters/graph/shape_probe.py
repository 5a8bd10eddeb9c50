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
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.signature import DecoderSignature, SignatureError
from mlx_transmuter.runtime.module import ProgramModule, trace_values
from mlx_transmuter.runtime.step_inputs import StepInputs

# (rows, past, seq): no size stands twice, no two sum to a third that a graph could confuse, and the extremes are in.
PROBE_SIZES = ((2, 7, 3), (1, 31, 5), (3, 21, 1), (5, 0, 11))


@dataclass(frozen=True)
class ShapeProbe:
    """signature, inputs: of the program seen. seen: for each trial, its values by name: numpy arrays, or unevaluated
    `mx.array`s.
    """

    signature: DecoderSignature
    inputs: tuple[Value, ...]
    step_values: tuple[dict[str, Any], ...]

    @staticmethod
    def run(program: Program, previous: ShapeProbe | None = None) -> ShapeProbe | None:
        """The observation of a decoder; None for a program that is none, that takes other inputs, or that cannot be
        walked.

        before: of the program that this one was made from by rewrites, which leave its values their names: only what is
        new is walked.
        """
        try:
            signature = DecoderSignature.from_program(program)
        except SignatureError:
            return None
        if signature.extra_inputs or signature.use_cache_branch_input:
            return None
        if previous is not None and previous.inputs != program.inputs:
            previous = None
        zeros = {name: mx.zeros(w.shape, ops.device_dtype(w.dtype)) for name, w in program.weights.items()}
        module = ProgramModule(program, zeros)
        earlier = previous.step_values if previous else [None] * len(PROBE_SIZES)
        try:
            seen = tuple(
                trace_values(module, values, **make_step_inputs(program, signature, *trial))
                for trial, values in zip(PROBE_SIZES, earlier, strict=True)
            )
        except ops.OperatorError:
            # What a node may have on the host can hang on nodes that weren't walked again.
            return ShapeProbe.run(program) if previous else None
        return ShapeProbe(signature, program.inputs, seen)

    def constant_value(self, name: str) -> np.ndarray | None:
        """The value, if it is on the host and the same in every trial."""
        first = self.step_values[0].get(name)
        if not isinstance(first, np.ndarray):
            return None
        same = all(
            isinstance(value := one.get(name), np.ndarray)
            and value.dtype == first.dtype
            and np.array_equal(value, first)
            for one in self.step_values[1:]
        )
        return first if same else None

    def shapes(self, name: str) -> list[tuple[int, ...]] | None:
        """The value's shape in each trial, or None for a value that is no array."""
        values = [one.get(name) for one in self.step_values]
        if not all(isinstance(value, (np.ndarray, mx.array)) for value in values):
            return None
        return [tuple(value.shape) for value in values]  # type: ignore[union-attr]

    def dtype(self, name: str) -> str | None:
        """The name of MLX's type of the value on the device, or None for one on the host."""
        value = self.step_values[0].get(name)
        return str(value.dtype).removeprefix("mlx.core.") if isinstance(value, mx.array) else None


def make_step_inputs(program: Program, signature: DecoderSignature, rows: int, past: int, seq: int) -> dict[str, Any]:
    """Returns zeros for a step of those sizes, with a full mask; no past where the graph carries nothing."""
    step_inputs = StepInputs.from_program(program, signature)
    past = past if signature.pairs else 0
    if signature.uses_pools:
        cache = step_inputs.zero_pools(rows, past, seq) | step_inputs.zero_states(rows)
    else:
        cache = step_inputs.empty_past(rows, past)
    tokens, first = step_inputs.zero_tokens(rows, seq), mx.zeros((rows, 1), mx.int32)
    return step_inputs.uniform(tokens=tokens, past_length=past, past=cache, logit_indices=first)
