"""Narrow: a cache that is cast to a half type where it is read and back where it is given is kept in that type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.observe import Observation
from mlx_transmuter.ops import CODES
from mlx_transmuter.program import Node
from mlx_transmuter.signature import Entry

_HALVES = ("float16", "bfloat16")


def narrow(graph: Graph) -> Iterator[Answer]:
    """Cast(past, half) and present = Cast(x, float32) with x in that half type → past and present in the half type.

    So write converters to float16 that keep the types of inputs and outputs. A number of a half type is the same number
    in float32, so nothing is rounded less or more.
    """
    seen = graph.observation
    if seen is None:
        return
    answers: list[Become] = []
    casts: list[Node] = []
    for entry in seen.signature.entries:
        ends = _ends(graph, seen, entry)
        if ends is not None:
            casts.append(ends[-1])
            answers += _narrowed(graph, entry, ends)
    if casts and len(casts) < len(seen.signature.entries):
        yield Declined(casts[0], "a part of the cache alone is cast; wanted all of it")
        return
    yield from answers


def _ends(graph: Graph, seen: Observation, entry: Entry) -> list[Node] | None:
    """The casts of the past and, as last, of the present, if they are all that stands between it and a half type."""
    last = graph.producer(entry.present, "Cast")
    kind = seen.dtype(last.inputs[0]) if last else None
    readers = [node for node in graph.consumers(entry.past) if not is_kind(node, "Shape")]
    if last is None or entry.dtype != "float32" or kind not in _HALVES:
        return None
    if not readers or not all(is_kind(node, "Cast") and node.attrs["to"] == CODES[kind] for node in readers):
        return None
    return None if graph.consumers(entry.present) else [*readers, last]


def _narrowed(graph: Graph, entry: Entry, casts: list[Node]) -> Iterator[Become]:
    kind = {code: name for name, code in CODES.items()}[casts[0].attrs["to"]]
    past = next(replace(value, dtype=kind) for value in graph.program.inputs if value.name == entry.past)
    present = next(replace(value, dtype=kind) for value in graph.program.outputs if value.name == entry.present)
    for node in casts[:-1]:
        yield Become(node, (), aliases={node.outputs[0]: entry.past}, inputs=(past,))
    yield Become(casts[-1], (), aliases={entry.present: casts[-1].inputs[0]}, outputs=(present,))
