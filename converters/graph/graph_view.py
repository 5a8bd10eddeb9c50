"""The view that rewrites have of a program: its nodes by what they compute and read, constants, weights, and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.program import Node, Program


def is_op_type(node: Node, *op_types: str) -> bool:
    """Whether the node is some version of one of the operators ("Expand" for Expand-8 and Expand-13, "mlx.linear")."""
    return node.op_type in op_types


class GraphView:
    """A read-only view of a program, with its producers, consumers and constants indexed by value name."""

    def __init__(self, program: Program, previous: GraphView | None = None):
        """previous: the view of the program that this one was rewritten from; its shape probe is then continued."""
        self.program = program
        self._previous = previous
        self.nodes = program.nodes
        self._producers = program.producers()
        self._consumers = program.consumers()
        self._outputs = {value.name for value in program.outputs}

    @cached_property
    def shape_probe(self) -> ShapeProbe | None:
        """The shapes, and the host values, of the program over steps of several sizes; None where it can't be probed.

        It is computed when it is first read.
        """
        previous, self._previous = self._previous, None
        return ShapeProbe.run(self.program, previous.last_shape_probe if previous else None)

    @property
    def last_shape_probe(self) -> ShapeProbe | None:
        """The newest shape probe of this view and of those before it, or None where none was computed."""
        if "shape_probe" in self.__dict__:
            return self.shape_probe
        return self._previous.last_shape_probe if self._previous else None

    def producer(self, name: str, *op_types: str) -> Node | None:
        """The node that computes the value, or None; with `op_types`, None for a node of another operator too."""
        node = self._producers.get(name)
        return node if node is not None and (not op_types or is_op_type(node, *op_types)) else None

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read the value, themselves or in a branch."""
        return self._consumers.get(name, [])

    def only_consumer(self, name: str) -> Node | None:
        """The node that reads the value, if it is the only one and the value is no output of the program; else None."""
        readers = self.consumers(name)
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def position(self, node: Node) -> int:
        """The place of a node of the program in the order of its nodes, from 0."""
        return self._positions[id(node)]

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {id(node): i for i, node in enumerate(self.nodes)}

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes, all of the program, in the order of its nodes."""
        return sorted(nodes, key=self.position)

    def weight(self, name: str) -> LazyTensor | None:
        """The tensor of a weight, or None for another value."""
        return self.program.tensors.get(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The array of a constant, or None for another value."""
        return self.program.constants.get(name)

    def array(self, name: str) -> np.ndarray | None:
        """The array of a weight, read now, or of a constant; None for another value."""
        weight = self.weight(name)
        return weight.read() if weight is not None else self.constant(name)

    def scalar(self, name: str) -> int | float | bool | None:
        """The number in a constant of one element, of any rank; None for another value, and for a string."""
        array = self.constant(name)
        return array.item() if array is not None and array.size == 1 and array.dtype.kind != "U" else None
