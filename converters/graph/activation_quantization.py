"""Whether a graph rounds its activations to 8 bits: such a graph's values follow every bit of what goes into them."""

from __future__ import annotations

from mlx_transmuter.program import Program

_DYNAMIC_QUANTIZATION_OPS = ("DynamicQuantizeLinear", "com.microsoft.DynamicQuantize", "com.microsoft.QAttention")
_STATIC_QUANTIZATION_OPS = ("QuantizeLinear-", "com.microsoft.QuantizeLinear-")


def quantizes_dynamically(program: Program) -> bool:
    """Whether the graph quantises activations by scales that it takes from them when it runs."""
    return any(node.op.startswith(_DYNAMIC_QUANTIZATION_OPS) for node in program.all_nodes())


def quantizes_activations(program: Program) -> bool:
    """Whether the graph rounds activations to 8 bits, by fixed scales or by those of a step."""
    return quantizes_dynamically(program) or any(
        node.op.startswith(_STATIC_QUANTIZATION_OPS) for node in program.all_nodes()
    )
