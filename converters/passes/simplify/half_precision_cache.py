"""Half-precision caches: a cache that the graph casts to a half type and back is stored in that type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.ops import ELEMENT_TYPE_CODES, ELEMENT_TYPE_NAMES
from mlx_transmuter.precision_options import HALF_DTYPES
from mlx_transmuter.program import Node
from mlx_transmuter.program.signature import CachePair


def use_half_precision_cache(graph: GraphView) -> Iterator[MatchOutcome]:
    """Gives past and present the half type of Cast(past, half) and of x in present = Cast(x, float32).

    Converters to float16 that keep the types of inputs and outputs write such casts. A number of a half type is the
    same number in float32, so nothing is rounded differently.
    """
    probe = graph.shape_probe
    if probe is None:
        return
    replacements: list[Replacement] = []
    present_casts: list[Node] = []
    for pair in probe.signature.cache_pairs:
        casts = _find_cache_casts(graph, probe, pair)
        if casts is not None:
            present_casts.append(casts[-1])
            replacements += _remove_casts(graph, pair, casts)
    if present_casts and len(present_casts) < len(probe.signature.cache_pairs):
        yield SkippedMatch(present_casts[0], "only some tensors of the cache are cast to a half type; expected all")
        return
    yield from replacements


def _find_cache_casts(graph: GraphView, probe: ShapeProbe, pair: CachePair) -> list[Node] | None:
    """Returns the casts of the past and then the cast of the present; None where the cache is used in another type."""
    present_cast = graph.producer(pair.present, "Cast")
    dtype = probe.dtype(present_cast.inputs[0]) if present_cast else None
    if present_cast is None or pair.dtype != "float32" or dtype not in HALF_DTYPES:
        return None
    past_casts = [node for node in graph.consumers(pair.past) if not is_op_type(node, "Shape")]
    to_half = [is_op_type(node, "Cast") and node.attrs["to"] == ELEMENT_TYPE_CODES[dtype] for node in past_casts]
    if not to_half or not all(to_half) or graph.consumers(pair.present):
        return None
    return [*past_casts, present_cast]


def _remove_casts(graph: GraphView, pair: CachePair, casts: list[Node]) -> Iterator[Replacement]:
    dtype = ELEMENT_TYPE_NAMES[casts[0].attrs["to"]]
    past = next(replace(value, dtype=dtype) for value in graph.program.inputs if value.name == pair.past)
    present = next(replace(value, dtype=dtype) for value in graph.program.outputs if value.name == pair.present)
    for node in casts[:-1]:
        yield Replacement(node, (), aliases={node.outputs[0]: pair.past}, program_inputs=(past,))
    yield Replacement(casts[-1], (), aliases={pair.present: casts[-1].inputs[0]}, program_outputs=(present,))
