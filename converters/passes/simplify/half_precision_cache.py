"""Narrow: a cache that is cast to a half type where it is read and back where it is given is kept in that type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.ops import ELEMENT_TYPE_CODES
from mlx_transmuter.precision_options import HALF_DTYPES
from mlx_transmuter.program import Node
from mlx_transmuter.program.signature import CachePair


def use_half_precision_cache(graph: GraphView) -> Iterator[MatchOutcome]:
    """Cast(past, half) and present = Cast(x, float32) with x in that half type → past and present in the half type.

    So write converters to float16 that keep the types of inputs and outputs. A number of a half type is the same number
    in float32, so nothing is rounded less or more.
    """
    seen = graph.shape_probe
    if seen is None:
        return
    answers: list[Replacement] = []
    casts: list[Node] = []
    for entry in seen.signature.cache_pairs:
        ends = _find_cache_casts(graph, seen, entry)
        if ends is not None:
            casts.append(ends[-1])
            answers += _remove_casts(graph, entry, ends)
    if casts and len(casts) < len(seen.signature.cache_pairs):
        yield SkippedMatch(casts[0], "a part of the cache alone is cast; wanted all of it")
        return
    yield from answers


def _find_cache_casts(graph: GraphView, probe: ShapeProbe, cache_pair: CachePair) -> list[Node] | None:
    """The casts of the past and, as last, of the present, if they are all that stands between it and a half type."""
    last = graph.producer(cache_pair.present, "Cast")
    kind = probe.dtype(last.inputs[0]) if last else None
    readers = [node for node in graph.consumers(cache_pair.past) if not is_op_type(node, "Shape")]
    if last is None or cache_pair.dtype != "float32" or kind not in HALF_DTYPES:
        return None
    if not readers or not all(
        is_op_type(node, "Cast") and node.attrs["to"] == ELEMENT_TYPE_CODES[kind] for node in readers
    ):
        return None
    return None if graph.consumers(cache_pair.present) else [*readers, last]


def _remove_casts(graph: GraphView, cache_pair: CachePair, casts: list[Node]) -> Iterator[Replacement]:
    kind = {code: name for name, code in ELEMENT_TYPE_CODES.items()}[casts[0].attrs["to"]]
    past = next(replace(value, dtype=kind) for value in graph.program.inputs if value.name == cache_pair.past)
    present = next(replace(value, dtype=kind) for value in graph.program.outputs if value.name == cache_pair.present)
    for node in casts[:-1]:
        yield Replacement(node, (), aliases={node.outputs[0]: cache_pair.past}, program_inputs=(past,))
    yield Replacement(casts[-1], (), aliases={cache_pair.present: casts[-1].inputs[0]}, program_outputs=(present,))
