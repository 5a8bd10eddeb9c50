"""The experts of a mixture: the stacks of their weights have as many as its router chooses among."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_transmuter.program.errors import ProgramError
from mlx_transmuter.program.layer_arrays import array_name
from mlx_transmuter.program.program import Node, Program

# Operators whose result has the experts of their first input, or of their second, and those whose result has a score
# for each expert that their first input has one for.
_SAME_EXPERTS = {
    **dict.fromkeys(("Cast", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"), 0),
    "mlx.dispatch": 1,
}
_SAME_SCORES = ("Cast", "Identity", "Softmax", "LogSoftmax", "Sigmoid", "Reshape")


def check_expert_stacks(program: Program) -> None:
    """Raises ProgramError for a layer of experts that has fewer than the layer whose scores choose among them."""
    producers = program.producers()
    for node in program.nodes:
        if node.op != "mlx.switch_linear" or len(node.inputs) < 3:
            continue
        choice = _source(node.inputs[2], producers, _SAME_EXPERTS)
        if choice is None or choice.op_type not in ("TopK", "mlx.router"):
            continue
        router = _source(choice.inputs[0], producers, dict.fromkeys(_SAME_SCORES, 0))
        if router is None or router.op != "mlx.linear":
            continue
        experts, choices = _rows(program, node.inputs[1]), _rows(program, router.inputs[1])
        if experts is not None and choices is not None and choices > experts:
            found = f"weights of {experts} experts, and a router of {choices} ({router.inputs[1]!r})"
            raise ProgramError(f"the layer {node.inputs[1]!r}", found, "weights of each expert that it chooses")


def _source(name: str, producers: Mapping[str, Node], same: Mapping[str, int]) -> Node | None:
    """Returns the first node before a value that is none of `same`, operators by the number of the input they keep."""
    node = producers.get(name)
    while node is not None and node.op_type in same and len(node.inputs) > same[node.op_type]:
        node = producers.get(node.inputs[same[node.op_type]])
    return node


def _rows(program: Program, layer: str) -> int | None:
    """Returns the size of the first axis of a layer's weight: of its outputs, or its experts."""
    weight = program.weights.get(array_name(layer, "weight"))
    return weight.shape[0] if weight is not None and weight.shape else None
