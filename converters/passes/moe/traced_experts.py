"""A mixture that was traced over the experts that its tokens chose runs over all experts.

An exporter that traces `for expert in nonzero(chosen)` writes as many experts as the traced tokens chose, and splits
what NonZero gives into that many parts. If they chose all, the graph runs only where all are chosen again; there the
parts are the experts' numbers, and with these numbers it also runs where few are chosen. This is no rewrite for speed:
it is applied before anything is compared with the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch, apply_rewrite
from mlx_transmuter.converters.graph.subgraph import evaluate_nodes
from mlx_transmuter.program import Node, Program

# What leads from the choices, one-hot, to whether an expert is chosen.
_COUNTING_OPS = ("Transpose", "ReduceSum", "ReduceMax", "Greater", "Cast", "Equal", "Not", "GreaterOrEqual")


def restore_traced_experts(program: Program, path: Path) -> Program:
    """The program with all experts of its mixtures. Raises ConvertError for a mixture whose trace lacks experts.

    path: of the ONNX file, for the error.
    """
    program, record = apply_rewrite(program, enumerate_traced_experts)
    for reason in record.skip_reasons:
        do = "export the model with more tokens (optimum: sequence_length=64)"
        raise ConvertError(path, f"a mixture that was traced on too few tokens: {reason}", "every expert traced", do)
    return program


def enumerate_traced_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Split(Transpose(NonZero(chosen [experts]))) into a part for each expert → the experts' numbers, each [1, 1]."""
    for node in graph.nodes:
        nonzero = _find_nonzero(graph, node)
        count = _expert_count(graph, nonzero.inputs[0]) if nonzero is not None else None
        if count is None:
            continue
        if count != len(node.outputs):
            yield SkippedMatch(node, f"{len(node.outputs)} of {count} experts were chosen where the model was traced")
            continue
        constants = {name: np.array([[i]], np.int64) for i, name in enumerate(node.outputs) if name}
        yield Replacement(node, (), constants=constants)


def _find_nonzero(graph: GraphView, node: Node) -> Node | None:
    """The NonZero whose indices the node splits one by one."""
    if not is_op_type(node, "Split") or node.attrs.get("axis", 0) != 0:
        return None
    sizes = graph.constant([*node.inputs, ""][1])
    transpose = graph.producer(node.inputs[0], "Transpose")
    if transpose is None or sizes is None or not (sizes == 1).all():
        return None
    return graph.producer(transpose.inputs[0], "NonZero")


def _expert_count(graph: GraphView, name: str) -> int | None:
    """The number of experts of a value [experts] that says which are chosen; None for any other value."""
    chain: list[Node] = []
    while (node := graph.producer(name)) is not None and not is_op_type(node, "OneHot"):
        if not is_op_type(node, *_COUNTING_OPS):
            return None
        chain.insert(0, node)
        name = node.inputs[0]
    if node is None or not chain:
        return None
    parameters = [name for reader in (node, *chain) for name in reader.inputs[1:] if name]
    if any(graph.constant(name) is None for name in parameters):
        return None
    constants = {name: graph.program.constants[name] for name in parameters}
    values = evaluate_nodes((node, *chain), constants | {node.inputs[0]: np.zeros((3, 2), np.int64)})
    chosen, depth = values[chain[-1].outputs[0]], int(constants[node.inputs[1]].item())
    return depth if chosen.ndim == 1 and chosen.size == depth else None
