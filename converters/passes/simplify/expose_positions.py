"""Positions: a graph that computes them from the length of its cache gets them as an input, so it runs over a buffer.

Such a graph (Gemma's) computes `arange(past, past + seq)` from the shape of its cache and uses it twice: to rotate keys
and queries, where it means positions, and to build the causal mask, where it means columns. Over a buffer with free
columns the two differ. The rewrite gives the first use an input of its own, `position_ids`, and leaves the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe
from mlx_transmuter.program import Node, Value
from mlx_transmuter.program.signature import infer_cache_mode

POSITION_IDS = "position_ids"
# What positions and columns go through alike, and the operators that tell the two apart.
_NEUTRAL_OPS = ("Unsqueeze", "Squeeze", "Cast", "Reshape", "Expand", "Identity", "Transpose", "Add", "Concat")
_COLUMN_OPS = ("LessOrEqual", "Less", "Greater", "GreaterOrEqual", "Equal", "Sub", "And", "Where")
_POSITION_OPS = ("MatMul", "Mul", "Einsum", "Sin", "Cos", "Gather", "RotaryEmbedding", "com.microsoft.RotaryEmbedding")


def expose_positions(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces arange(past, past + seq) of shape [1, seq], where it rotates or embeds, by the input position_ids."""
    probe = graph.shape_probe
    if probe is None or probe.signature.positions_input or infer_cache_mode(graph.program, probe.signature) != "grow":
        return
    positions = _find_positions(probe)
    readers = _PositionReaders(graph)
    for name in sorted(positions):
        for reader in graph.consumers(name):
            if positions.isdisjoint(reader.outputs):  # else it only renames the positions
                readers.redirect(reader, name, POSITION_IDS)
    yield from (
        SkippedMatch(reader, f"{reader.op} reads positions, and may mean columns") for reader in readers.unknown
    )
    if all(is_op_type(nodes[0], "Shape") for nodes in readers.replacements.values()):
        return
    value = Value(POSITION_IDS, "int64", ("batch_size", "sequence_length"))
    for node in graph.nodes:
        if id(node) in readers.replacements:
            yield Replacement(node, readers.replacements[id(node)], program_inputs=(value,))


def _find_positions(probe: ShapeProbe) -> set[str]:
    """Returns the host values that are arange(past, past + seq), [1, seq], in every probe step."""
    expected = [np.arange(size.past, size.past + size.seq)[None] for size in PROBE_SIZES]
    return {
        name
        for name in probe.step_values[0]
        if (values := probe.host_integers(name)) is not None and all(map(np.array_equal, values, expected))
    }


@dataclass
class _PositionReaders:
    """The nodes that read positions. replacements: id(node) -> the nodes that replace it. unknown: of unknown use."""

    graph: GraphView
    replacements: dict[int, tuple[Node, ...]] = field(default_factory=dict)
    unknown: list[Node] = field(default_factory=list)

    def redirect(self, reader: Node, name: str, new_name: str) -> None:
        """Lets the reader of `name` read `new_name` where it means positions; one that means both is there twice."""
        use = "positions" if is_op_type(reader, "Shape") else _classify_use(self.graph, reader)
        first, *others = self.replacements.get(id(reader), (reader,))
        inputs = tuple(new_name if value == name else value for value in first.inputs)
        if use == "positions":
            self.replacements[id(reader)] = (replace(first, inputs=inputs), *others)
        elif use is None and is_op_type(reader, *_NEUTRAL_OPS) and _has_mixed_uses(self.graph, reader):
            output = f"{reader.outputs[0]}.positions"
            self.replacements[id(reader)] = (first, *others, replace(reader, inputs=inputs, outputs=(output,)))
            for consumer in self.graph.consumers(reader.outputs[0]):
                self.redirect(consumer, reader.outputs[0], output)
        elif use is None:
            self.unknown.append(reader)


def _has_mixed_uses(graph: GraphView, node: Node) -> bool:
    """Returns whether some readers of the node's output mean positions, and others something else."""
    uses = [_classify_use(graph, reader) for reader in graph.consumers(node.outputs[0])]
    return len(uses) > 1 and "positions" in uses


def _classify_use(graph: GraphView, node: Node, depth: int = 8) -> str | None:
    """Returns what `node` takes arange(past, past + seq) for: "positions", "columns", or None where that is unknown."""
    if is_op_type(node, *_COLUMN_OPS):
        return "columns"
    if is_op_type(node, *_POSITION_OPS):
        return "positions"
    if not depth or not is_op_type(node, *_NEUTRAL_OPS):
        return None
    uses = {
        _classify_use(graph, reader, depth - 1)
        for reader in graph.consumers(node.outputs[0])
        if not is_op_type(reader, "Shape")
    }
    return uses.pop() if len(uses) == 1 else None
