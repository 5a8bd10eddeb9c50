"""How far the logits of a converted module may differ from those of its graph."""

from __future__ import annotations

import math

from mlx_transmuter.converters.graph.activation_quantization import quantizes_activations
from mlx_transmuter.program import Program

# How far logits may differ, relative to their range (maximum − minimum), by the type that the graph computes in. The
# rewrites keep the graph's arithmetic up to its order of summation; two orders of a sum differ by some 1e-6 of the
# range in float32 and 1e-2 in half types.
# A dynamic graph rounds its activations to 8 bits by a scale of the whole step: a sum in another order can move a value
# by one of 255 steps, and the next layers by more.
TOLERANCES = {"float32": 1e-4, "float16": 3e-2, "dynamic": 5e-2, "bfloat16": 1e-1}


def tolerance(program: Program) -> float:
    """Returns the tolerance of the least exact type among those of the weights, the inputs and the outputs."""
    kinds = {weight.dtype for weight in program.weights.values() if math.prod(weight.shape) > 1}
    kinds |= {value.dtype for value in (*program.inputs, *program.outputs)}
    kinds |= {"dynamic"} if quantizes_activations(program) else set()
    return max(share for kind, share in TOLERANCES.items() if kind in kinds or kind == "float32")
