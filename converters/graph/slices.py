"""Slices: which part of which axis a Slice or a Split takes, where the graph's constants say so."""

from __future__ import annotations

from typing import NamedTuple

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.program import Node


class Slice(NamedTuple):
    """Elements `begin` to `end`, every `step`-th, of one axis.

    axis: counted from 0 where the value's rank is known, else as the graph has it, which may be from the end (-1).
    begin, end, step: as the graph has them. Negative ones count from the end of the axis, and `end` may lie past it;
    `indices` resolves them.
    """

    axis: int
    begin: int
    end: int
    step: int = 1

    def indices(self, size: int) -> tuple[int, int, int]:
        """Begin, end and step within an axis of `size` elements, none of the first two negative or past its end."""
        return slice(self.begin, self.end, self.step).indices(size)


def slice_of(graph: GraphView, probe: ShapeProbe | None, node: Node) -> Slice | None:
    """Returns what a Slice of a single axis takes, where all of it is constant; None for any other node.

    probe: tells the rank of the value that is sliced; None where the graph can't be probed.
    """
    if not is_op_type(node, "Slice") or len(node.inputs) not in (4, 5):
        return None
    numbers = [graph.scalar(name) for name in node.inputs[1:]]
    if any(number is None for number in numbers):
        return None
    begin, end, axis, step = (*(int(number) for number in numbers if number is not None), 1)[:4]
    return Slice(_axis_from_start(probe, node, axis), begin, end, step)


def sliced_axis(graph: GraphView, probe: ShapeProbe | None, node: Node) -> int | None:
    """Returns the axis that a Split or a Slice of a single axis works on, as in `Slice.axis`; None for another node.

    Begin, end and sizes may be unknown.
    """
    if is_op_type(node, "Split"):
        return _axis_from_start(probe, node, int(node.attrs.get("axis", 0)))
    axis = graph.scalar(node.inputs[3]) if is_op_type(node, "Slice") and len(node.inputs) > 3 else None
    return None if axis is None else _axis_from_start(probe, node, int(axis))


def split_sizes(graph: GraphView, node: Node) -> list[int] | None:
    """Returns the sizes of the pieces of a Split whose sizes are constant; None for any other node.

    A Split into equal pieces names no sizes, and has None too.
    """
    if not is_op_type(node, "Split"):
        return None
    sizes = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("split")
    return None if sizes is None else [int(size) for size in sizes]


def _axis_from_start(probe: ShapeProbe | None, node: Node, axis: int) -> int:
    """The axis of the value that the node slices, counted from 0 where the rank is known."""
    shapes = probe.shapes(node.inputs[0]) if probe is not None else None
    rank = len(shapes[0]) if shapes else 0
    return axis + rank if -rank <= axis < 0 else axis
