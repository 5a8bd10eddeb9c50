"""Scores: what a softmax of attention is taken of, read off the nodes before it.

Exporters scale queries, keys, scores, or scores with their mask; they bound scores, mask them several times, subtract
their largest, and put a column of sinks beside them. All of that is one form: factor · (q · kᵀ), bounded, with masks
that each have a factor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.masks import HIDDEN_THRESHOLD, ScoreMask

_PASSTHROUGH_OPS = ("Cast", "Identity", "Dropout")
_BROADCAST_OPS = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Transpose", "Cast", "Identity", "Tile")


@dataclass(frozen=True)
class AttentionScores:
    """q · kᵀ · scale, as softcap · tanh(· / softcap) where softcap is not 0, plus masks.

    q: a value; keys: a part of the cache; sinks: a weight with a score of no column for each head.
    """

    q: str
    cached_keys: CachePairView
    scale: float
    softcap: float = 0.0
    masks: tuple[ScoreMask, ...] = ()
    sinks: str | None = None

    def multiply(self, factor: float) -> AttentionScores:
        """The scores multiplied by the factor."""
        masks = tuple(mask.multiply(factor) for mask in self.masks)
        return replace(self, scale=self.scale * factor, softcap=self.softcap * factor, masks=masks)


def match_scores(
    graph: GraphView, probe: ShapeProbe, presents: Mapping[str, CachePairView], value: str
) -> AttentionScores | str:
    """What the value is as scores of attention, up to a number that a row's scores share, or why it is none."""
    node = graph.producer(value)
    unknown = f"the scores come from {node.op if node else value}"
    if node is None:
        return unknown
    if is_op_type(node, "MatMul") or is_op_type(node, "com.microsoft.FusedMatMul"):
        keys = find_cache_view(graph, presents, node.inputs[1])
        if keys is None or node.attrs.get("transA", 0):
            return "the scores' product is with something else than cached keys"
        q, scale = strip_constant_factors(graph, node.inputs[0])
        return AttentionScores(q, keys[0], scale * keys[1] * float(node.attrs.get("alpha", 1.0)))
    if is_op_type(node, *_PASSTHROUGH_OPS):
        return match_scores(graph, probe, presents, node.inputs[0])
    if is_op_type(node, "Reshape"):
        return (
            match_scores(graph, probe, presents, node.inputs[0])
            if keeps_last_two_axes(probe, node.inputs[0], value)
            else unknown
        )
    if is_op_type(node, "Where"):
        return _match_where_mask(graph, probe, presents, node)
    if is_op_type(node, "Sub"):
        largest = graph.producer(node.inputs[1], "ReduceMax")
        if largest is None or largest.inputs[0] != node.inputs[0] or not _reduces_last_axis(graph, largest):
            return unknown
        return match_scores(graph, probe, presents, node.inputs[0])
    if is_op_type(node, "Concat"):
        return _match_sinks(graph, probe, presents, node)
    if is_op_type(node, "Tanh"):
        scores = match_scores(graph, probe, presents, node.inputs[0])
        if isinstance(scores, str):
            return scores
        return unknown if scores.masks or scores.softcap or scores.sinks else replace(scores, softcap=1.0)
    if is_op_type(node, "Add") and not any(_is_scalar_constant(graph, name) for name in node.inputs):
        return _match_added_mask(graph, probe, presents, node) or unknown
    if not (is_op_type(node, "Mul") or is_op_type(node, "Div")):
        return unknown
    chain, factor = strip_constant_factor(graph, value)
    if chain == value or factor <= 0:
        return unknown
    scores = match_scores(graph, probe, presents, chain)
    if isinstance(scores, str):
        return scores
    return "the scores are scaled after their sinks" if scores.sinks else scores.multiply(factor)


def _is_scalar_constant(graph: GraphView, name: str) -> bool:
    constant = graph.constant(name)
    return constant is not None and constant.size == 1


def _match_added_mask(
    graph: GraphView, probe: ShapeProbe, presents: Mapping[str, CachePairView], node
) -> AttentionScores | None:
    """Add(scores, mask) and Add(mask, scores)."""
    for chain, mask in (node.inputs, node.inputs[::-1]):
        scores = match_scores(graph, probe, presents, chain)
        if isinstance(scores, AttentionScores) and not scores.sinks:
            return replace(scores, masks=(*scores.masks, ScoreMask(mask, "add")))
    return None


def _match_where_mask(
    graph: GraphView, probe: ShapeProbe, presents: Mapping[str, CachePairView], node
) -> AttentionScores | str:
    """Where(condition, scores, low) and Where(condition, low, scores)."""
    for chain, low, meaning in ((node.inputs[1], node.inputs[2], "seen"), (node.inputs[2], node.inputs[1], "hidden")):
        constant = graph.constant(low)
        if constant is not None and constant.size == 1 and float(constant.item()) < HIDDEN_THRESHOLD:
            scores = match_scores(graph, probe, presents, chain)
            if isinstance(scores, str) or scores.sinks:
                return scores if isinstance(scores, str) else "the scores are masked after their sinks"
            return replace(scores, masks=(*scores.masks, ScoreMask(node.inputs[0], meaning, float(constant.item()))))
    return "the scores are chosen by a Where that is no mask"


def _match_sinks(
    graph: GraphView, probe: ShapeProbe, presents: Mapping[str, CachePairView], node
) -> AttentionScores | str:
    """Concat(scores, sinks) on the last axis, the sinks a weight with a number for each head."""
    before, after = probe.shapes(node.inputs[0]), probe.shapes(node.outputs[0])
    name = node.inputs[-1]
    while (maker := graph.producer(name)) is not None and is_op_type(maker, *_BROADCAST_OPS):
        name = maker.inputs[0]
    weight = graph.weight(name)
    wider = before and after and all((*b[:-1], b[-1] + 1) == a for b, a in zip(before, after, strict=True))
    if len(node.inputs) != 2 or weight is None or not before or not wider or weight.size != before[0][1]:
        return "the scores stand beside something that is no weight of a number for each head"
    scores = match_scores(graph, probe, presents, node.inputs[0])
    return scores if isinstance(scores, str) or scores.sinks else replace(scores, sinks=name)


def _reduces_last_axis(graph: GraphView, node) -> bool:
    """Whether the reduction is over the last axis alone and keeps it."""
    axes = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("axes")
    return axes is not None and list(axes) == [-1] and bool(node.attrs.get("keepdims", 1))


def keeps_last_two_axes(probe: ShapeProbe, before: str, after: str) -> bool:
    """Whether both values are, in every trial, stacks of matrices of the same sizes."""
    old, new = probe.shapes(before), probe.shapes(after)
    return bool(old and new) and all(b[-2:] == a[-2:] for b, a in zip(old or (), new or (), strict=True))


def strip_constant_factor(graph: GraphView, value: str) -> tuple[str, float]:
    """The value without the constant factor that its node multiplies by or divides by, and that factor."""
    node = graph.producer(value)
    if node is None or not (is_op_type(node, "Mul") or is_op_type(node, "Div")):
        return value, 1.0
    constants = [graph.constant(name) for name in node.inputs]
    at = next((i for i, c in enumerate(constants) if c is not None and c.size == 1), None)
    if at is None or (is_op_type(node, "Div") and at == 0):
        return value, 1.0
    factor = float(constants[at].item())  # type: ignore[union-attr]
    return node.inputs[1 - at], 1 / factor if is_op_type(node, "Div") else factor


def strip_constant_factors(graph: GraphView, value: str) -> tuple[str, float]:
    """The value without its constant factors, and their product."""
    scale = 1.0
    while (inner := strip_constant_factor(graph, value))[0] != value:
        value, scale = inner[0], scale * inner[1]
    return value, scale


def find_cache_view(
    graph: GraphView, presents: Mapping[str, CachePairView], value: str
) -> tuple[CachePairView, float] | None:
    """The part of the cache that the value is, repeated for the heads that share it, and its constant factor."""
    scale = 1.0
    while value not in presents:
        value, factor = strip_constant_factors(graph, value)
        scale *= factor
        node = graph.producer(value)
        if value in presents or node is None or not is_op_type(node, *_BROADCAST_OPS):
            break
        value = node.inputs[0]
    return (presents[value], scale) if value in presents else None
