"""Whether a graph rounds its activations to 8 bits: such a graph's values follow every bit of what goes into them."""

from __future__ import annotations

from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.operator_sets import DYNAMIC_QUANTIZATION_OPS, QUANTIZE_OPS
from mlx_transmuter.program import Program


def quantizes_dynamically(program: Program) -> bool:
    """Returns whether the graph quantizes activations by scales that it computes from them when it runs."""
    return any(is_op_type(node, *DYNAMIC_QUANTIZATION_OPS) for node in program.all_nodes())


def quantizes_activations(program: Program) -> bool:
    """Returns whether the graph rounds activations to 8 bits, by fixed scales or by those of a step."""
    return any(is_op_type(node, *DYNAMIC_QUANTIZATION_OPS, *QUANTIZE_OPS) for node in program.all_nodes())
