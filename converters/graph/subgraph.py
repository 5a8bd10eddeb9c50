"""Parts of a graph, computed at conversion: a part of a program, a chain of nodes, or the nodes behind one value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.program_walk import evaluate_node


def evaluate_outputs(program: Program, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, mx.array]:
    """Computes values of a program for those inputs, running only the nodes that they need.

    Returns name -> value. Raises OperatorError where a node cannot run.
    """
    outputs = tuple(Value(name, "float32", None) for name in dict.fromkeys(names))
    part = replace(program, outputs=outputs).select_outputs([value.name for value in outputs])
    weights = {name: tensor.to_device() for name, tensor in part.tensors.items()}
    return ProgramModule(part, weights)(**inputs)


def evaluate_nodes(nodes: Iterable[Node], values: Mapping[str, Any]) -> dict[str, Any]:
    """Computes nodes, each of which reads `values` and outputs of the nodes before it.

    Returns the outputs by name: numpy arrays where they are small, else `mx.array`s. Raises OperatorError where a node
    cannot run.
    """
    computed: dict[str, Any] = {}
    for node in nodes:
        computed |= zip(node.outputs, evaluate_node(node, {**values, **computed}), strict=False)
    return computed


@dataclass(frozen=True)
class Subgraph:
    """The nodes, in their order, that compute the value `output` from boundary values.

    shapes: values that Shape and Size nodes of the subgraph give, as in one step of a shape probe.
    """

    graph: GraphView
    nodes: list[Node]
    shapes: dict[str, np.ndarray]
    output: str

    @staticmethod
    def collect(
        graph: GraphView, step_values: Mapping[str, Any], output: str, boundary: Collection[str], max_nodes: int
    ) -> Subgraph | None:
        """Returns the subgraph between the values of `boundary` and `output`; None where it reads other values that
        are not constant, or has more than `max_nodes` nodes.

        step_values: the values of a step of a shape probe.
        """
        nodes: dict[int, Node] = {}
        shapes: dict[str, np.ndarray] = {}
        pending = [output]
        while pending:
            name = pending.pop()
            if not name or name in boundary or graph.constant(name) is not None:
                continue
            node = graph.producer(name)
            if node is None:
                return None
            if is_op_type(node, "Shape", "Size"):
                shape = step_values.get(name)
                if not isinstance(shape, np.ndarray):
                    return None
                shapes[name] = shape
            elif id(node) not in nodes:
                if len(nodes) == max_nodes:
                    return None
                nodes[id(node)] = node
                pending += node.all_inputs()
        return Subgraph(graph, graph.in_order(nodes.values()), shapes, output)

    def evaluate(self, values: Mapping[str, Any]) -> mx.array | None:
        """Computes `output` for those values of the boundary; None where a node cannot run."""
        inputs = {**values, **self.shapes}
        computed = {name for node in self.nodes for name in node.outputs}
        constants = {
            name: self.graph.program.constants[name]
            for node in self.nodes
            for name in node.all_inputs()
            if name not in computed and name not in inputs
        }
        program_inputs = tuple(Value(name, "float32", None) for name in inputs)
        try:
            program = Program(program_inputs, (Value(self.output, "float32", None),), self.nodes, constants)
            return ProgramModule(program, {})(**inputs)[self.output]
        except OperatorError:
            return None
