"""Slices of one value that are its parts, one after the other, are replaced by one Split."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import build_split
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.slices import slice_of
from mlx_transmuter.program import Node


def fuse_slices_into_split(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces x[..., :a], x[..., a:b] and x[..., b:] by Split(x). Phi 3 slices queries, keys and values so."""
    probe = graph.shape_probe
    if probe is None:
        return
    slices: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if is_op_type(node, "Slice"):
            slices.setdefault(node.inputs[0], []).append(node)
    for name, nodes in slices.items():
        ranges = [_last_axis_range(graph, probe, node) for node in nodes]
        pieces = sorted((bounds, node.outputs[0]) for bounds, node in zip(ranges, nodes, strict=True) if bounds)
        if len(nodes) < 2 or len(pieces) < len(nodes):
            continue
        begins, ends = [begin for (begin, _), _ in pieces], [end for (_, end), _ in pieces]
        size = (probe.shapes(name) or [(0,)])[0][-1]
        if [*begins, size] != [0, *ends]:
            continue
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        split, constants = build_split(name, sizes, [output for _, output in pieces], name=nodes[0].name)
        yield Replacement(nodes[0], (split,), constants=constants)
        yield from (Replacement(node, ()) for node in nodes[1:])


def _last_axis_range(graph: GraphView, probe: ShapeProbe, node: Node) -> tuple[int, int] | None:
    """Returns begin and end of a Slice of the last axis, whose size no step changes; None for any other Slice."""
    shapes, part = probe.shapes(node.inputs[0]), slice_of(graph, probe, node)
    if part is None or not shapes or probe.dtype(node.inputs[0]) is None or len({shape[-1:] for shape in shapes}) > 1:
        return None
    rank = len(shapes[0])
    if not rank or part.axis != rank - 1 or part.step != 1:
        return None
    begin, end, _ = part.indices(shapes[0][-1])
    return (begin, end) if begin < end else None
