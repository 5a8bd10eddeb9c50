"""Hit: a mixture that was traced over the experts that its tokens hit runs over all of them.

An exporter that traces `for expert in nonzero(hit)` writes as many experts as the traced tokens hit, and splits what
nonzero gives into that many parts. If it hit all, the graph runs only where all are hit again; there the parts are the
experts' numbers, and as these they serve where few are hit too. This is no rewrite for speed: it is done to the graph
before anything is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch, apply_rewrite
from mlx_transmuter.program import Node, Program
from mlx_transmuter.runtime.module import evaluate_node

# What leads from the choices, one-hot, to whether an expert is hit.
_COUNTING_OPS = ("Transpose", "ReduceSum", "ReduceMax", "Greater", "Cast", "Equal", "Not", "GreaterOrEqual")


def restore_traced_experts(program: Program, path: Path) -> Program:
    """The program after `hit`. Raises ConvertError for a mixture of which the trace lacks experts."""
    program, record = apply_rewrite(program, enumerate_traced_experts)
    for reason in record.skip_reasons:
        do = "export the model with more tokens (optimum: sequence_length=64)"
        raise ConvertError(path, f"a mixture that was traced on too few tokens: {reason}", "every expert traced", do)
    return program


def enumerate_traced_experts(graph: GraphView) -> Iterator[MatchOutcome]:
    """Split(Transpose(NonZero(hit [experts]))) into a part for each expert → the experts' numbers, each [1, 1]."""
    for node in graph.nodes:
        found = _find_nonzero(graph, node)
        if found is None:
            continue
        count = _expert_count(graph, found.inputs[0])
        if count is None:
            continue
        if count != len(node.outputs):
            yield SkippedMatch(node, f"{len(node.outputs)} of {count} experts were hit where the model was traced")
            continue
        constants = {name: np.array([[i]], np.int64) for i, name in enumerate(node.outputs) if name}
        yield Replacement(node, (), constants=constants)


def _find_nonzero(graph: GraphView, node: Node) -> Node | None:
    """The NonZero whose indices the node splits one by one."""
    if not is_op_type(node, "Split") or node.attrs.get("axis", 0) != 0:
        return None
    source, *rest = node.inputs
    sizes = graph.constant(rest[0]) if rest else None
    turned = graph.producer(source, "Transpose")
    if turned is None or sizes is None or not (sizes == 1).all():
        return None
    return graph.producer(turned.inputs[0], "NonZero")


def _expert_count(graph: GraphView, name: str) -> int | None:
    """How many experts a value [experts] that says which are hit is of; None for any other value."""
    chain: list[Node] = []
    while (node := graph.producer(name)) is not None and not is_op_type(node, "OneHot"):
        if not is_op_type(node, *_COUNTING_OPS):
            return None
        chain.insert(0, node)
        name = node.inputs[0]
    if node is None or not chain:
        return None
    others = [one for one in (*node.inputs[1:], *(x for each in chain for x in each.inputs[1:])) if one]
    if any(graph.constant(one) is None for one in others):
        return None
    values = {one: graph.program.constants[one] for one in others} | {node.inputs[0]: np.zeros((3, 2), np.int64)}
    for each in (node, *chain):
        values |= dict(zip(each.outputs, evaluate_node(each, values), strict=False))
    found, depth = values[chain[-1].outputs[0]], int(values[node.inputs[1]].item())
    return depth if found.ndim == 1 and found.size == depth else None
