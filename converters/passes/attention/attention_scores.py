"""Scores: what a softmax of attention is taken of, read off the nodes before it.

Exporters scale queries, keys, scores, or scores with their mask; they bound scores, mask them several times, subtract
their largest, and put a column of sinks beside them. All of that is one form: scale · (q · kᵀ), with a softcap, and
masks that each have a factor of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlx_transmuter.converters.graph.constant_factors import strip_constant_factor, strip_constant_factors
from mlx_transmuter.converters.graph.operator_sets import BROADCAST_OPS, VALUE_KEEPING_OPS
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.attention_context import AttentionContext, UnsupportedAttention
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.score_masks import HIDDEN_THRESHOLD, AddedMask, BooleanMask, ScoreMask
from mlx_transmuter.program import Node


@dataclass(frozen=True)
class AttentionScores:
    """q · kᵀ · scale, as softcap · tanh(· / softcap) where softcap is not 0, plus masks.

    q: a value; cached_keys: where the cache has the keys; sinks: a weight with a score of no column for each head.
    """

    q: str
    cached_keys: CachePairView
    scale: float
    softcap: float = 0.0
    masks: tuple[ScoreMask, ...] = ()
    sinks: str | None = None

    def scaled(self, factor: float) -> AttentionScores:
        """Returns the scores times the factor."""
        masks = tuple(mask.scaled(factor) for mask in self.masks)
        return replace(self, scale=self.scale * factor, softcap=self.softcap * factor, masks=masks)


def match_scores(context: AttentionContext, value: str) -> AttentionScores:
    """Returns what the value is as scores of attention, up to a number that all scores of a row share.

    Raises UnsupportedAttention for anything else.
    """
    node = context.graph.producer(value)
    if node is None:
        raise UnsupportedAttention(f"the scores come from {value}")
    if node.op_type not in _MATCHERS:
        raise _unknown(node)
    return _MATCHERS[node.op_type](context, node)


def _unknown(node: Node) -> UnsupportedAttention:
    return UnsupportedAttention(f"the scores come from {node.op}")


def _match_key_product(context: AttentionContext, node: Node) -> AttentionScores:
    """MatMul(q, kᵀ), and FusedMatMul with a factor."""
    keys = context.cached_value(node.inputs[1])
    if keys is None or node.attrs.get("transA", 0):
        raise UnsupportedAttention("the scores are not a product with cached keys")
    q, scale = strip_constant_factors(context.graph, node.inputs[0])
    return AttentionScores(q, keys[0], scale * keys[1] * float(node.attrs.get("alpha", 1.0)))


def _match_first_input(context: AttentionContext, node: Node) -> AttentionScores:
    """Cast(scores), Identity(scores) and Dropout(scores)."""
    return match_scores(context, node.inputs[0])


def _match_reshape(context: AttentionContext, node: Node) -> AttentionScores:
    """Reshape(scores) that leaves tokens and columns."""
    if not keeps_last_two_axes(context.probe, node.inputs[0], node.outputs[0]):
        raise _unknown(node)
    return match_scores(context, node.inputs[0])


def _match_where_mask(context: AttentionContext, node: Node) -> AttentionScores:
    """Where(condition, scores, low) and Where(condition, low, scores)."""
    condition, if_true, if_false = node.inputs
    for scores_name, low_name, visible in ((if_true, if_false, True), (if_false, if_true, False)):
        low = context.graph.scalar(low_name)
        if low is not None and float(low) < HIDDEN_THRESHOLD:
            scores = match_scores(context, scores_name)
            if scores.sinks:
                raise UnsupportedAttention("the scores are masked after the sinks are put beside them")
            return replace(scores, masks=(*scores.masks, BooleanMask(condition, visible, float(low))))
    raise UnsupportedAttention("the scores go through a Where that is not a mask")


def _match_largest_subtracted(context: AttentionContext, node: Node) -> AttentionScores:
    """Sub(scores, ReduceMax(scores)) over the columns."""
    largest = context.graph.producer(node.inputs[1], "ReduceMax")
    if largest is None or largest.inputs[0] != node.inputs[0]:
        raise _unknown(node)
    axes = context.graph.constant(largest.inputs[1]) if len(largest.inputs) > 1 else largest.attrs.get("axes")
    if axes is None or list(axes) != [-1] or not largest.attrs.get("keepdims", 1):
        raise _unknown(node)
    return match_scores(context, node.inputs[0])


def _match_sinks(context: AttentionContext, node: Node) -> AttentionScores:
    """Concat(scores, sinks) on the last axis, the sinks a weight with a number for each head."""
    before, after = context.probe.shapes(node.inputs[0]), context.probe.shapes(node.outputs[0])
    name = node.inputs[-1]
    while (producer := context.graph.producer(name, *BROADCAST_OPS)) is not None:
        name = producer.inputs[0]
    weight = context.graph.weight(name)
    wider = before and after and all((*b[:-1], b[-1] + 1) == a for b, a in zip(before, after, strict=True))
    if len(node.inputs) != 2 or weight is None or not before or not wider or weight.size != before[0][1]:
        raise UnsupportedAttention("the scores stand beside something else than a weight with a number for each head")
    scores = match_scores(context, node.inputs[0])
    return scores if scores.sinks else replace(scores, sinks=name)


def _match_softcap(context: AttentionContext, node: Node) -> AttentionScores:
    """Tanh(scores), a softcap of 1."""
    scores = match_scores(context, node.inputs[0])
    if scores.masks or scores.softcap or scores.sinks:
        raise _unknown(node)
    return replace(scores, softcap=1.0)


def _match_added_mask(context: AttentionContext, node: Node) -> AttentionScores:
    """Add(scores, mask) and Add(mask, scores)."""
    if all(context.graph.scalar(name) is None for name in node.inputs):
        for scores_name, mask in (node.inputs, node.inputs[::-1]):
            try:
                scores = match_scores(context, scores_name)
            except UnsupportedAttention:
                continue
            if not scores.sinks:
                return replace(scores, masks=(*scores.masks, AddedMask(mask)))
    raise _unknown(node)


def _match_constant_factor(context: AttentionContext, node: Node) -> AttentionScores:
    """Mul(scores, constant) and Div(scores, constant)."""
    value, factor = strip_constant_factor(context.graph, node.outputs[0])
    if value == node.outputs[0] or factor <= 0:
        raise _unknown(node)
    scores = match_scores(context, value)
    if scores.sinks:
        raise UnsupportedAttention("the scores are scaled after the sinks are put beside them")
    return scores.scaled(factor)


_MATCHERS: dict[str, Callable[[AttentionContext, Node], AttentionScores]] = {
    "MatMul": _match_key_product,
    "com.microsoft.FusedMatMul": _match_key_product,
    **dict.fromkeys(VALUE_KEEPING_OPS, _match_first_input),
    "Reshape": _match_reshape,
    "Where": _match_where_mask,
    "Sub": _match_largest_subtracted,
    "Concat": _match_sinks,
    "Tanh": _match_softcap,
    "Add": _match_added_mask,
    "Mul": _match_constant_factor,
    "Div": _match_constant_factor,
}


def keeps_last_two_axes(probe: ShapeProbe, before: str, after: str) -> bool:
    """Returns whether both values are, in every probe step, stacks of matrices of the same sizes."""
    old, new = probe.shapes(before), probe.shapes(after)
    return bool(old and new) and all(b[-2:] == a[-2:] for b, a in zip(old or (), new or (), strict=True))
