"""Parted: slices of one value that are its parts, one after the other, become one split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.program import Node


def fuse_slices_into_split(graph: GraphView) -> Iterator[MatchOutcome]:
    """x[..., :a], x[..., a:b], x[..., b:] → Split(x). So Phi 3 takes queries, keys and values from their product."""
    seen = graph.shape_probe
    if seen is None:
        return
    slices: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if is_op_type(node, "Slice"):
            slices.setdefault(node.inputs[0], []).append(node)
    for name, nodes in slices.items():
        ranges = {_last_axis_range(graph, seen, node): node for node in nodes}
        if len(nodes) < 2 or len(ranges) < len(nodes) or None in ranges:
            continue
        order = sorted(ranges)  # pyright: ignore[reportArgumentType]
        size = (seen.shapes(name) or [(0,)])[0][-1]
        if [begin for begin, _ in order] + [size] != [0] + [end for _, end in order]:
            continue
        sizes = f"{nodes[0].outputs[0]}.sizes"
        split = Node(
            "Split-13", (name, sizes), tuple(ranges[one].outputs[0] for one in order), {"axis": -1}, nodes[0].name
        )
        lengths = np.array([end - begin for begin, end in order], np.int64)
        yield Replacement(nodes[0], (split,), constants={sizes: lengths})
        for node in nodes[1:]:
            yield Replacement(node, ())


def _last_axis_range(graph: GraphView, probe: ShapeProbe, node: Node) -> tuple[int, int] | None:
    """The begin and the end of a Slice of the last axis, whose size is always the same; None for another Slice."""
    shapes = probe.shapes(node.inputs[0])
    constants = [graph.constant(name) for name in node.inputs[1:]]
    if shapes is None or probe.dtype(node.inputs[0]) is None or len({shape[-1:] for shape in shapes}) > 1:
        return None
    if len(constants) not in (3, 4) or any(one is None or one.size != 1 for one in constants):
        return None
    begin, end, axis, step = (*(int(one.ravel()[0]) for one in constants if one is not None), 1)[:4]
    rank, size = len(shapes[0]), shapes[0][-1] if shapes[0] else 0
    if not rank or axis % rank != rank - 1 or step != 1:
        return None
    begin, end, _ = slice(begin, end).indices(size)
    return (begin, end) if begin < end else None
