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

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import infer_cache_mode

POSITION_IDS = "position_ids"
# What a value goes through without changing what it means, and where it shows what it meant.
_MEANING_KEEPING_OPS = ("Unsqueeze", "Squeeze", "Cast", "Reshape", "Expand", "Identity", "Transpose", "Add", "Concat")
_COLUMN_OPS = ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal", "Sub", "And", "Where")
_POSITION_OPS = ("MatMul", "Mul", "Einsum", "Sin", "Cos", "Gather", "RotaryEmbedding", "com.microsoft.RotaryEmbedding")


def expose_positions(graph: GraphView) -> Iterator[MatchOutcome]:
    """arange(past, past + seq) of shape [1, seq], where it rotates or embeds → the input position_ids [batch, seq]."""
    seen = graph.shape_probe
    if seen is None or seen.signature.positions_input or infer_cache_mode(graph.program, seen.signature) != "grow":
        return
    wanted = {
        name for name, value in seen.step_values[0].items() if isinstance(value, np.ndarray) and value.dtype.kind == "i"
    }
    for (_, past, seq), values in zip(PROBE_SIZES, seen.step_values, strict=True):
        places = np.arange(past, past + seq)[None]
        wanted = {name for name in wanted if values[name].shape == (1, seq) and np.array_equal(values[name], places)}
    moved = _PositionReaders(graph, {}, [])
    for name in sorted(wanted):
        for reader in graph.consumers(name):
            if any(out in wanted for out in reader.outputs):
                continue  # the same positions once more, under another name
            moved.redirect(reader, name, POSITION_IDS)
    yield from (
        SkippedMatch(reader, f"the use of positions by {reader.op} is not known") for reader in moved.unknown_readers
    )
    if not any(not is_op_type(nodes[0], "Shape") for nodes in moved.replacements.values()):
        return
    value = Value(POSITION_IDS, "int64", ("batch_size", "sequence_length"))
    for node in graph.nodes:
        if id(node) in moved.replacements:
            yield Replacement(node, moved.replacements[id(node)], program_inputs=(value,))


@dataclass
class _PositionReaders:
    """What reads positions, and as what: id(node) -> the nodes that it becomes; and nodes of an unknown use."""

    graph: GraphView
    replacements: dict[int, tuple[Node, ...]]
    unknown_readers: list[Node]

    def redirect(self, reader: Node, name: str, new_name: str) -> None:
        """Lets the reader of `name` read `to` where it means positions. Where what it gives means both, it does it
        twice, once of each."""
        use = "positions" if is_op_type(reader, "Shape") else _classify_use(self.graph, reader, name)
        now, *others = self.replacements.get(id(reader), (reader,))
        inputs = tuple(new_name if one == name else one for one in now.inputs)
        if use == "positions":
            self.replacements[id(reader)] = (replace(now, inputs=inputs), *others)
        elif use is None and is_op_type(reader, *_MEANING_KEEPING_OPS) and _has_mixed_uses(self.graph, reader):
            output = f"{reader.outputs[0]}.positions"
            self.replacements[id(reader)] = (now, *others, replace(reader, inputs=inputs, outputs=(output,)))
            for after in self.graph.consumers(reader.outputs[0]):
                self.redirect(after, reader.outputs[0], output)
        elif use is None:
            self.unknown_readers.append(reader)


def _has_mixed_uses(graph: GraphView, node: Node) -> bool:
    """Whether what the node gives is used, all of it, in ways that are known, though not in one."""
    uses = [_classify_use(graph, reader, node.outputs[0]) for reader in graph.consumers(node.outputs[0])]
    return len(uses) > 1 and "positions" in uses


def _classify_use(graph: GraphView, node: Node, name: str, depth: int = 8) -> str | None:
    """What the value means where `node` reads it: "positions", "columns", or None where that cannot be told."""
    if is_op_type(node, *_COLUMN_OPS):
        return "columns"
    if is_op_type(node, *_POSITION_OPS):
        return "positions"
    if not depth or not is_op_type(node, *_MEANING_KEEPING_OPS):
        return None
    uses = {
        _classify_use(graph, reader, node.outputs[0], depth - 1)
        for reader in graph.consumers(node.outputs[0])
        if not is_op_type(reader, "Shape")
    }
    return uses.pop() if len(uses) == 1 else None
