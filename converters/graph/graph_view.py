"""What a rewrite sees of a program, and what it may answer; the driver applies the answers and records them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.tensors import LazyTensor
from mlx_transmuter.program import Node, Program, Value, WeightInfo


@dataclass(frozen=True)
class Replacement:
    """The node `root` becomes `nodes`, which give all its outputs that are read; with new layers, weights and
    constants.

    aliases: outputs of `root` that from now on are another value. inputs, outputs: those of the program that are new or
    of another type. gone: those that it has no more.
    """

    root: Node
    nodes: tuple[Node, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    arrays: dict[str, LazyTensor] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    program_inputs: tuple[Value, ...] = ()
    program_outputs: tuple[Value, ...] = ()
    removed_values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SkippedMatch:
    """The node `root` looked like a match and stays as it is, for that reason."""

    root: Node
    reason: str


MatchOutcome = Replacement | SkippedMatch
Rewrite = Callable[["GraphView"], Iterator[MatchOutcome]]


@dataclass
class RewriteRecord:
    """What a rewrite did: its name, how many nodes it replaced, and why it declined others (a reason once, with a
    count).
    """

    name: str
    replaced_count: int
    skip_reasons: dict[str, int]


class GraphView:
    """A program with its producers, consumers and constants at hand."""

    def __init__(self, program: Program, previous: GraphView | None = None):
        """before: the graph that rewrites made this program from."""
        self.program = program
        self._previous = previous
        self.nodes = program.nodes
        self._producers = program.producers()
        self._consumers = program.consumers()
        self._outputs = {value.name for value in program.outputs}

    @cached_property
    def shape_probe(self) -> ShapeProbe | None:
        """What the values of the program are over several sizes of a step; see Observation."""
        before, self._previous = self._previous, None
        return ShapeProbe.run(self.program, before.last_shape_probe if before else None)

    @property
    def last_shape_probe(self) -> ShapeProbe | None:
        """The last observation of this graph or of those before it, if there was one."""
        if "shape_probe" in self.__dict__:
            return self.shape_probe
        return self._previous.last_shape_probe if self._previous else None

    def producer(self, name: str, op_type: str | None = None) -> Node | None:
        """The node that gives the value, if it is of that kind ("Transpose", any opset)."""
        node = self._producers.get(name)
        return node if node is not None and (op_type is None or is_op_type(node, op_type)) else None

    def consumers(self, name: str) -> list[Node]:
        """The nodes that read the value."""
        return self._consumers.get(name, [])

    def only_consumer(self, name: str) -> Node | None:
        """The one node that reads the value, if there is one and the graph does not give the value."""
        readers = self.consumers(name)
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def weight(self, name: str) -> LazyTensor | None:
        """The weight's tensor, or None for another value."""
        return self.program.tensors.get(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The constant's array, or None for another value."""
        return self.program.constants.get(name)


def is_op_type(node: Node, op_type: str) -> bool:
    """Whether the node is some form of the operator `kind`."""
    return node.op.rpartition("-")[0] == op_type or node.op == op_type


def apply_rewrite(program: Program, rewrite: Rewrite, graph: GraphView | None = None) -> tuple[Program, RewriteRecord]:
    """The program after the rewrite, without the nodes that nothing reads any more, and what the rewrite did.

    graph: the program's, where there is one already.
    """
    replaced: dict[int, Replacement] = {}
    declined: dict[str, int] = {}
    for answer in rewrite(graph or GraphView(program)):
        if isinstance(answer, SkippedMatch):
            declined[answer.reason] = declined.get(answer.reason, 0) + 1
        else:
            replaced[id(answer.root)] = answer
    record = RewriteRecord(getattr(rewrite, "__name__", "rewrite"), len(replaced), declined)
    if not replaced:
        return program, record
    nodes: list[Node] = []
    layers, arrays, constants = dict(program.layers), dict(program.tensors), dict(program.constants)
    inputs = {value.name: value for value in program.inputs}
    outputs = {value.name: value for value in program.outputs}
    aliases: dict[str, str] = {}
    for node in program.nodes:
        answer = replaced.get(id(node))
        if answer is None:
            nodes.append(redirect_reads(node, aliases))
            continue
        nodes += (redirect_reads(new, aliases) for new in answer.nodes)
        aliases |= {name: aliases.get(other, other) for name, other in answer.aliases.items()}
        layers |= answer.layers
        arrays |= answer.arrays
        constants |= answer.constants
        inputs |= {value.name: value for value in answer.program_inputs}
        outputs |= {value.name: value for value in answer.program_outputs}
    gone = {name for answer in replaced.values() for name in answer.removed_values}
    inputs, outputs = ({n: value for n, value in side.items() if n not in gone} for side in (inputs, outputs))
    nodes = _restore_output_names(nodes, aliases, list(outputs))
    program = replace(
        program,
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        nodes=nodes,
        layers=layers,
        tensors=arrays,
        constants=constants,
        weights={name: WeightInfo(array.dtype, array.shape) for name, array in arrays.items()},
    )
    return program.select_outputs([value.name for value in program.outputs]), record


def rename_values(program: Program, names: Mapping[str, str]) -> Program:
    """The program with those values of its nodes under other names."""
    nodes = [
        replace(redirect_reads(node, dict(names)), outputs=tuple(names.get(name, name) for name in node.outputs))
        for node in program.nodes
    ]
    return replace(program, nodes=nodes) if names else program


def redirect_reads(node: Node, aliases: dict[str, str]) -> Node:
    """The node reading, in its branches too, other values in place of those that have an alias."""
    if not aliases or not any(name in aliases for name in node.all_inputs()):
        return node
    attrs = {
        key: replace(
            value,
            nodes=[redirect_reads(inner, aliases) for inner in value.nodes],
            outputs=tuple(replace(out, name=aliases.get(out.name, out.name)) for out in value.outputs),
        )
        if isinstance(value, Program)
        else value
        for key, value in node.attrs.items()
    }
    return replace(node, inputs=tuple(aliases.get(name, name) for name in node.inputs), attrs=attrs)


def _restore_output_names(nodes: list[Node], aliases: dict[str, str], outputs: list[str]) -> list[Node]:
    """The nodes, such that outputs of the graph that are another value now are given under their own names still."""
    given = {name for node in nodes for name in node.outputs}
    names: dict[str, str] = {}
    copies = []
    for output in outputs:
        source = aliases.get(output)
        if source in given and source not in outputs and source not in names:
            names[source] = output
        elif source is not None:
            copies.append(Node("Identity-1", (names.get(source, source),), (output,)))
    renamed = [
        replace(node, outputs=tuple(names.get(name, name) for name in node.outputs)) if names else node
        for node in nodes
    ]
    return [redirect_reads(node, names) for node in renamed] + copies
