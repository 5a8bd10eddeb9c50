"""The node builder: collects new nodes and their constants, under names that begin with one prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_transmuter.ops import ELEMENT_TYPE_CODES
from mlx_transmuter.program import Node


def cast_output(node: Node, dtype: str) -> tuple[Node, Node]:
    """Returns the node with `.uncast` after the name of its first output, and a Cast to the ONNX type ("float16") that
    gives this output its name.
    """
    output = node.outputs[0]
    uncast = replace(node, outputs=(f"{output}.uncast", *node.outputs[1:]))
    return uncast, Node("Cast-9", (f"{output}.uncast",), (output,), {"to": ELEMENT_TYPE_CODES[dtype]}, node.name)


def build_split(
    value: str, sizes: Sequence[int], outputs: Sequence[str], axis: int = -1, name: str = ""
) -> tuple[Node, dict[str, np.ndarray]]:
    """Returns a split of the value into pieces of those sizes on the axis, and the constant that it reads them from."""
    constant = f"{outputs[0]}.sizes"
    split = Node("Split-18", (value, constant), tuple(outputs), {"axis": axis}, name)
    return split, {constant: np.array(sizes, np.int64)}


@dataclass
class NodeBuilder:
    """New nodes and constants of a rewrite. Each value that it names is `prefix.suffix`.

    node_name: the name of each node, that of the node which they replace.
    """

    prefix: str
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    node_name: str = ""

    def add_constant(self, suffix: str, values: Any) -> str:
        """Adds a constant; integers become int64. Returns its name."""
        self.constants[f"{self.prefix}.{suffix}"] = np.array(values)
        return f"{self.prefix}.{suffix}"

    def add_node(self, op: str, inputs: tuple[str, ...], suffix: str, **attrs) -> str:
        """Adds a node with one output. Returns the output's name."""
        return self.add_multi_output_node(op, inputs, (suffix,), **attrs)[0]

    def add_multi_output_node(
        self, op: str, inputs: tuple[str, ...], suffixes: tuple[str, ...], **attrs
    ) -> tuple[str, ...]:
        """Adds a node with an output for each suffix. Returns the outputs' names."""
        outputs = tuple(f"{self.prefix}.{suffix}" for suffix in suffixes)
        self.nodes.append(Node(op, inputs, outputs, attrs, self.node_name))
        return outputs

    def add_cast(self, value: str, dtype: str, suffix: str) -> str:
        """Adds a cast of the value to an ONNX type ("float16"). Returns the output's name."""
        return self.add_node("Cast-9", (value,), suffix, to=ELEMENT_TYPE_CODES[dtype])

    def add_arange(self, value: str, axis: int, suffix: str) -> str:
        """Adds the indices along an axis of the value, int64 [its size]. Returns the output's name."""
        zero, one = self.add_constant(f"{suffix}.zero", 0), self.add_constant(f"{suffix}.one", 1)
        shape = self.add_node("Shape-1", (value,), f"{suffix}.shape")
        axis_name = self.add_constant(f"{suffix}.axis", axis)
        size = self.add_node("Gather-1", (shape, axis_name), f"{suffix}.size", axis=0)
        return self.add_node("Range-11", (zero, size, one), suffix)

    def add_split(self, value: str, sizes: Sequence[int], suffixes: tuple[str, ...], axis: int = -1) -> list[str]:
        """Adds a split of the value into pieces of those sizes on the axis. Returns the names of the pieces."""
        names = [f"{self.prefix}.{suffix}" for suffix in suffixes]
        split, constants = build_split(value, sizes, names, axis)
        self.nodes.append(split)
        self.constants |= constants
        return names

    def add_split_heads(self, value: str, heads: int, suffix: str) -> str:
        """Adds the value [rows, seq, heads · size] as [rows, heads, seq, size]. Returns the output's name."""
        shape = self.add_constant(f"{suffix}.shape", np.array([0, 0, heads, -1], np.int64))
        split = self.add_node("Reshape-5", (value, shape), f"{suffix}.4")
        return self.add_node("Transpose-1", (split,), suffix, perm=[0, 2, 1, 3])
