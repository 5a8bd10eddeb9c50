"""Parts of a graph: the nodes between some values and another, and what they give for values that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.module import ProgramModule


def collect_subgraph(
    graph: GraphView,
    step_values: dict[str, Any],
    node_order: dict[int, int],
    output: str,
    boundary: set[str],
    max_nodes: int,
) -> tuple[list[Node], dict[str, np.ndarray]] | None:
    """The nodes that compute the output of the cuts, and the shapes that they read of other values in that trial of an
    observation; None where other values go into it, or too many nodes.
    """
    nodes: dict[int, Node] = {}
    shapes: dict[str, np.ndarray] = {}
    left = [output]
    while left:
        name = left.pop()
        node = graph.producer(name)
        if not name or name in boundary or graph.constant(name) is not None or (node is not None and id(node) in nodes):
            continue
        if node is not None and is_op_type(node, "Shape", "Size"):
            found = step_values.get(name)
            if not isinstance(found, np.ndarray):
                return None
            shapes[name] = found
            continue
        if node is None or len(nodes) == max_nodes:
            return None
        nodes[id(node)] = node
        left += node.all_inputs()
    return sorted(nodes.values(), key=lambda node: node_order[id(node)]), shapes


def evaluate_subgraph(graph: GraphView, nodes: list[Node], values: dict[str, Any], output: str) -> Any:
    """What the nodes give for these values, an `mx.array`; None where they can't be run."""
    given = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.all_inputs() if name not in given and name not in values}
    constants = {name: graph.program.constants[name] for name in read}
    inputs = tuple(Value(name, "float32", None) for name in values)
    try:
        program = Program(inputs, (Value(output, "float32", None),), nodes, constants)
        return ProgramModule(program, {})(**values)[output]
    except OperatorError:
        return None
