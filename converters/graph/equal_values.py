"""Equal values: which values of a graph are computed, or stored, more than once."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import RANDOM_OPS
from mlx_transmuter.program import Node, Program

_NONDETERMINISTIC_OPS = (*RANDOM_OPS, "Dropout")


def first_equal_values(graph: GraphView) -> dict[str, str]:
    """Returns, for each constant and each value of a node, the first one that is equal to it (maybe itself).

    Values are equal where nodes of one operator compute them with the same attributes from equal inputs. Outputs of the
    program, random values, and nodes with a branch or an array as attribute are left out.
    """
    first_constants: dict[Hashable, str] = {}
    firsts = {
        name: first_constants.setdefault((array.dtype.str, array.shape, array.tobytes()), name)
        for name, array in graph.program.constants.items()
    }
    outputs = {value.name for value in graph.program.outputs}
    first_nodes: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if is_op_type(node, *_NONDETERMINISTIC_OPS) or any(
            isinstance(value, Program | np.ndarray) for value in node.attrs.values()
        ):
            continue
        attrs = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
        inputs = tuple(firsts.get(name, name) for name in node.inputs)
        named_outputs = tuple(bool(name) for name in node.outputs)
        first = first_nodes.setdefault((node.op, inputs, attrs, named_outputs), node)
        if first is node or outputs.isdisjoint(node.outputs):
            firsts |= {name: other for name, other in zip(node.outputs, first.outputs, strict=True) if name}
    return firsts
