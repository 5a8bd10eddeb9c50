"""Parts of a graph: the nodes between some values and another, and what they give for values that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np

from converters.match import Graph
from mlx_transmuter.module import Module
from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Node, Program, Value


def is_kind_of(node: Node, kinds: tuple[str, ...]) -> bool:
    """Whether the node is some form of one of the operators."""
    return node.op.rpartition("-")[0] in kinds


def behind(
    graph: Graph, trial: dict[str, Any], order: dict[int, int], output: str, cuts: set[str], most: int
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
        if not name or name in cuts or graph.constant(name) is not None or (node is not None and id(node) in nodes):
            continue
        if node is not None and is_kind_of(node, ("Shape", "Size")):
            found = trial.get(name)
            if not isinstance(found, np.ndarray):
                return None
            shapes[name] = found
            continue
        if node is None or len(nodes) == most:
            return None
        nodes[id(node)] = node
        left += node.reads()
    return sorted(nodes.values(), key=lambda node: order[id(node)]), shapes


def computed(graph: Graph, nodes: list[Node], values: dict[str, Any], output: str) -> Any:
    """What the nodes give for these values, an `mx.array`; None where they can't be run."""
    given = {name for node in nodes for name in node.outputs}
    read = {name for node in nodes for name in node.reads() if name not in given and name not in values}
    constants = {name: graph.program.constants[name] for name in read}
    inputs = tuple(Value(name, "float32", None) for name in values)
    try:
        program = Program(inputs, (Value(output, "float32", None),), nodes, constants)
        return Module(program, {})(**values)[output]
    except OperatorError:
        return None
