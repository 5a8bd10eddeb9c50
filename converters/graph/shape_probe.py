"""The shape probe: the host values and the shapes of a decoder's values, for steps of several sizes.

The program is walked once for each size, with nothing computed on the device and no weight read: some milliseconds a
layer. A shape or an axis that a graph computes in ten nodes is one host value; over several sizes it shows whether it
is constant, and whether a reshape changes anything. The proof of a conversion tests what rewrites conclude from it, on
other sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.signature import DecoderSignature, SignatureError
from mlx_transmuter.runtime.module import ProgramModule, trace_values
from mlx_transmuter.runtime.step_inputs import StepInputs


class StepSize(NamedTuple):
    """A step of `seq` tokens in each of `rows` sequences, after `past` tokens."""

    rows: int
    past: int
    seq: int


# No number stands here twice, and no sum of two is a third, so that a graph's sizes can be told apart. One row, one
# token and an empty past are among them.
PROBE_SIZES = (StepSize(2, 7, 3), StepSize(1, 31, 5), StepSize(3, 21, 1), StepSize(5, 0, 11))


@dataclass(frozen=True)
class ShapeProbe:
    """The values of a program in a step of each of `PROBE_SIZES`.

    signature, inputs: those of the program. step_values: for each size, name -> value: a numpy array for a value on the
    host, an unevaluated `mx.array` for one on the device, a layer for a layer.
    """

    signature: DecoderSignature
    inputs: tuple[Value, ...]
    step_values: tuple[dict[str, Any], ...]

    @staticmethod
    def run(program: Program, previous: ShapeProbe | None = None) -> ShapeProbe | None:
        """Returns the probe of a decoder; None for a program that is no decoder, has extra inputs or a branch for its
        cache, or has shapes that depend on values on the device.

        previous: the probe of the program that rewrites made this one from. Rewrites keep the names of values, so only
        new values are walked.
        """
        try:
            signature = DecoderSignature.from_program(program)
        except SignatureError:
            return None
        if signature.extra_inputs or signature.use_cache_branch_input:
            return None
        if previous is not None and previous.inputs != program.inputs:
            previous = None
        # Each is a view of one element: an operator may evaluate a weight, or a view of it.
        zeros = {
            name: mx.broadcast_to(mx.zeros((), ops.device_dtype(weight.dtype)), weight.shape)
            for name, weight in program.weights.items()
        }
        module = ProgramModule(program, zeros)
        earlier = previous.step_values if previous else [None] * len(PROBE_SIZES)
        try:
            step_values = tuple(
                # A switch lies past all of these lengths: the steps take turns on its sides.
                trace_values(
                    module,
                    values,
                    **make_step_inputs(program, signature, *size, number % signature.length_switches.sides),
                )
                for number, (size, values) in enumerate(zip(PROBE_SIZES, earlier, strict=True))
            )
        except ops.OperatorError:
            # Whether a value is on the host can depend on nodes that were not walked again.
            return ShapeProbe.run(program) if previous else None
        return ShapeProbe(signature, program.inputs, step_values)

    def constant_value(self, name: str) -> np.ndarray | None:
        """The value, if it is on the host and the same for every size; else None."""
        first, *others = (values.get(name) for values in self.step_values)
        if not isinstance(first, np.ndarray):
            return None
        is_constant = all(
            isinstance(value, np.ndarray) and value.dtype == first.dtype and np.array_equal(value, first)
            for value in others
        )
        return first if is_constant else None

    def host_integers(self, name: str) -> list[np.ndarray] | None:
        """The value for each size, if it is one of signed integers on the host; else None."""
        values = [values.get(name) for values in self.step_values]
        arrays = [value for value in values if isinstance(value, np.ndarray) and value.dtype.kind == "i"]
        return arrays if len(arrays) == len(values) else None

    def shapes(self, name: str) -> list[tuple[int, ...]] | None:
        """The value's shape for each size, or None for a value that is no array."""
        values = [values.get(name) for values in self.step_values]
        if not all(isinstance(value, (np.ndarray, mx.array)) for value in values):
            return None
        return [tuple(value.shape) for value in values]  # type: ignore[union-attr]

    def dtype(self, name: str) -> str | None:
        """MLX's name for the type of a value on the device ("float16"), or None for a value on the host."""
        value = self.step_values[0].get(name)
        return str(value.dtype).removeprefix("mlx.core.") if isinstance(value, mx.array) else None


def make_step_inputs(
    program: Program, signature: DecoderSignature, rows: int, past: int, seq: int, side: int = 0
) -> dict[str, Any]:
    """Returns the inputs of a step of that size: zeros, a mask of ones, and no past where the graph carries none.

    side: of the graph's length switches.
    """
    step_inputs = StepInputs.from_program(program, signature)
    past = past if signature.pairs else 0
    if signature.uses_pools:
        cache = step_inputs.zero_pools(rows, past, seq) | step_inputs.zero_states(rows)
    else:
        cache = step_inputs.empty_past(rows, past)
    tokens, first = step_inputs.zero_tokens(rows, seq), mx.zeros((rows, 1), mx.int32)
    return step_inputs.uniform(tokens=tokens, past_length=past, past=cache, logit_indices=first, side=side)
