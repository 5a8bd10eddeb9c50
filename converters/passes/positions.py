"""Positions: a graph that takes positions from the length of its cache gets them as an input, so that it runs over a
buffer.

Such a graph (Gemma's) computes `arange(past, past + seq)` from the shape of its cache and uses it twice: to rotate keys
and queries, where it means positions, and to build the causal mask, where it means columns. Over a buffer with free
columns the two differ. The rewrite gives the first use an input of its own, `position_ids`, and leaves the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.observe import TRIALS
from mlx_transmuter.program import Node, Value
from mlx_transmuter.signature import declared_mode

NAME = "position_ids"
# What a value goes through without changing what it means, and where it shows what it meant.
_CARRIES = ("Unsqueeze", "Squeeze", "Cast", "Reshape", "Expand", "Identity", "Transpose", "Add", "Concat")
_COLUMNS = ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal", "Sub", "And", "Where")
_POSITIONS = ("MatMul", "Mul", "Einsum", "Sin", "Cos", "Gather", "RotaryEmbedding", "com.microsoft.RotaryEmbedding")


def positions(graph: Graph) -> Iterator[Answer]:
    """arange(past, past + seq) of shape [1, seq], where it rotates or embeds → the input position_ids [batch, seq]."""
    seen = graph.observation
    if seen is None or seen.signature.positions or declared_mode(graph.program, seen.signature) != "grow":
        return
    wanted = {name for name, value in seen.seen[0].items() if isinstance(value, np.ndarray) and value.dtype.kind == "i"}
    for (_, past, seq), values in zip(TRIALS, seen.seen, strict=True):
        places = np.arange(past, past + seq)[None]
        wanted = {name for name in wanted if values[name].shape == (1, seq) and np.array_equal(values[name], places)}
    moved = _Moved(graph, {}, [])
    for name in sorted(wanted):
        for reader in graph.consumers(name):
            if any(out in wanted for out in reader.outputs):
                continue  # the same positions once more, under another name
            moved.move(reader, name, NAME)
    yield from (Declined(reader, f"the use of positions by {reader.op} is not known") for reader in moved.unknown)
    if not any(not is_kind(nodes[0], "Shape") for nodes in moved.nodes.values()):
        return
    value = Value(NAME, "int64", ("batch_size", "sequence_length"))
    for node in graph.nodes:
        if id(node) in moved.nodes:
            yield Become(node, moved.nodes[id(node)], inputs=(value,))


@dataclass
class _Moved:
    """What reads positions, and as what: id(node) -> the nodes that it becomes; and nodes of an unknown use."""

    graph: Graph
    nodes: dict[int, tuple[Node, ...]]
    unknown: list[Node]

    def move(self, reader: Node, name: str, to: str) -> None:
        """Lets the reader of `name` read `to` where it means positions. Where what it gives means both, it does it
        twice, once of each."""
        use = "positions" if is_kind(reader, "Shape") else _use(self.graph, reader, name)
        now, *others = self.nodes.get(id(reader), (reader,))
        inputs = tuple(to if one == name else one for one in now.inputs)
        if use == "positions":
            self.nodes[id(reader)] = (replace(now, inputs=inputs), *others)
        elif use is None and any(is_kind(reader, kind) for kind in _CARRIES) and _is_both(self.graph, reader):
            output = f"{reader.outputs[0]}.positions"
            self.nodes[id(reader)] = (now, *others, replace(reader, inputs=inputs, outputs=(output,)))
            for after in self.graph.consumers(reader.outputs[0]):
                self.move(after, reader.outputs[0], output)
        elif use is None:
            self.unknown.append(reader)


def _is_both(graph: Graph, node: Node) -> bool:
    """Whether what the node gives is used, all of it, in ways that are known, though not in one."""
    uses = [_use(graph, reader, node.outputs[0]) for reader in graph.consumers(node.outputs[0])]
    return len(uses) > 1 and "positions" in uses


def _use(graph: Graph, node: Node, name: str, depth: int = 8) -> str | None:
    """What the value means where `node` reads it: "positions", "columns", or None where that cannot be told."""
    if any(is_kind(node, kind) for kind in _COLUMNS):
        return "columns"
    if any(is_kind(node, kind) for kind in _POSITIONS):
        return "positions"
    if not depth or not any(is_kind(node, kind) for kind in _CARRIES):
        return None
    uses = {
        _use(graph, reader, node.outputs[0], depth - 1)
        for reader in graph.consumers(node.outputs[0])
        if not is_kind(reader, "Shape")
    }
    return uses.pop() if len(uses) == 1 else None
