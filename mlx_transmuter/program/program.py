"""The Program: the one form in which a graph is read, rewritten, compared, saved and run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_transmuter.program.layer_arrays import LAYER_ARRAY_NAMES, array_owner
from mlx_transmuter.program.validation import check_program

# The most elements of a constant, which is saved inside program.json.
MAX_CONSTANT_ELEMENTS = 4096


@dataclass(frozen=True)
class Value:
    """A named input or output. `shape` has an int, a symbol or None (unknown) per axis; None for an unknown rank."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Node:
    """One application of an operator.

    `op` is the declared form, `Expand-8`, `com.microsoft.FusedMatMul-1` or `mlx.linear`. `inputs` and `outputs` are
    value names, "" where an optional one is left out. `attrs` holds ints, floats, strings, lists of these, numpy arrays
    and Programs. `name` is the exporter's name of the node, for errors and for naming weights.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}" if self.name else f"{self.op} -> {', '.join(self.outputs)}"

    @property
    def op_type(self) -> str:
        """The operator without the version of its form: `Expand` of `Expand-8`; `mlx.linear` as it is."""
        return self.op.rpartition("-")[0] or self.op

    def subprograms(self) -> Iterator[Program]:
        """Returns the programs among the attributes: the branches of If, the bodies of Loop and Scan."""
        return (value for value in self.attrs.values() if isinstance(value, Program))

    def all_inputs(self) -> Iterator[str]:
        """Yields every outer value that the node reads, those of its branches included."""
        yield from (name for name in self.inputs if name)
        for branch in self.subprograms():
            yield from branch.free_values()


@dataclass(frozen=True)
class WeightInfo:
    """The ONNX type and the shape of a tensor in the safetensors file."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Program:
    """A graph in single assignment form: every name is defined once, branches included.

    inputs, outputs: the graph's Values.
    nodes: in an order in which each value is defined before it is read.
    constants: small arrays known on the host (shapes, axes, scalars), saved inside program.json.
    weights: names and types of the tensors in model.safetensors.
    layers: path -> {"kind": ..., options}: values that are an `mlx.nn` layer, so that MLX's tools find them.
    metadata: what the conversion recorded (see Metadata).
    tensors: the data of the weights during a conversion; never saved.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: list[Node]
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    weights: dict[str, WeightInfo] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict, repr=False)

    def input(self, name: str) -> Value | None:
        """Returns the input of that name, or None."""
        return next((value for value in self.inputs if value.name == name), None)

    def output(self, name: str) -> Value | None:
        """Returns the output of that name, or None."""
        return next((value for value in self.outputs if value.name == name), None)

    def all_nodes(self) -> Iterator[Node]:
        """Yields the nodes of the program and of every branch in it."""
        for node in self.nodes:
            yield node
            for branch in node.subprograms():
                yield from branch.all_nodes()

    def producers(self) -> dict[str, Node]:
        """Returns value name -> the node (of this level) that computes it."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    def consumers(self) -> dict[str, list[Node]]:
        """Returns value name -> the nodes (of this level) that read it, themselves or in a branch."""
        consumers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.all_inputs()):
                consumers.setdefault(name, []).append(node)
        return consumers

    def free_values(self) -> list[str]:
        """Returns the names that the program reads and does not define: what a branch reads of the graph around it."""
        defined = {value.name for value in self.inputs}
        defined |= self.constants.keys() | self.weights.keys() | self.layers.keys()
        free: dict[str, None] = {}
        for node in self.nodes:
            free.update((name, None) for name in node.all_inputs() if name not in defined)
            defined.update(node.outputs)
        free.update((value.name, None) for value in self.outputs if value.name not in defined)
        return list(free)

    def with_tensors(self, tensors: dict[str, Any]) -> Program:
        """Returns the program with `tensors` as the data of its weights, with their types and shapes."""
        weights = {name: WeightInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        return replace(self, tensors=tensors, weights=weights)

    def select_outputs(self, outputs: list[str]) -> Program:
        """Returns the program with those of its outputs alone, and the nodes, constants and weights that they need."""
        selected = tuple(value for value in self.outputs if value.name in set(outputs))
        needed = {value.name for value in selected}
        nodes = []
        for node in reversed(self.nodes):
            if needed & set(node.outputs):
                needed.update(node.all_inputs())
                nodes.append(replace(node, outputs=tuple(name if name in needed else "" for name in node.outputs)))

        def needed_values(table: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in table.items() if name in needed}

        def is_layer_array(name: str) -> bool:
            owner = array_owner(name, self.layers)
            return owner is not None and owner[0] in needed and owner[1] in LAYER_ARRAY_NAMES

        weights = {name: value for name, value in self.weights.items() if name in needed or is_layer_array(name)}
        return replace(
            self,
            outputs=selected,
            nodes=nodes[::-1],
            constants=needed_values(self.constants),
            weights=weights,
            layers=needed_values(self.layers),
            tensors={name: array for name, array in self.tensors.items() if name in weights},
        )

    def validate(
        self,
        where: str = "program",
        outer_values: frozenset[str] = frozenset(),
        is_known_operator: Callable[[str], bool] | None = None,
    ) -> None:
        """Raises ProgramError unless each name is defined once and before it is read.

        where: the file, for the error. outer_values: the values of the program around a branch. is_known_operator: says
        whether an operator is declared; None for no check of that.
        """
        check_program(self, where, outer_values, is_known_operator)
