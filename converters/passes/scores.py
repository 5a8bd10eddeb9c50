"""Scores: what a softmax of attention is taken of, read off the nodes before it.

Exporters scale queries, keys, scores, or scores with their mask; they bound scores, mask them several times, subtract
their largest, and put a column of sinks beside them. All of that is one form: factor · (q · kᵀ), bounded, with masks
that each have a factor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from converters.match import Graph, is_kind
from converters.observe import Observation
from converters.passes.masks import HIDDEN, Mask
from converters.passes.past import Part

_SAME = ("Cast", "Identity", "Dropout")
_REPEATS = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Transpose", "Cast", "Identity", "Tile")


@dataclass(frozen=True)
class Scores:
    """q · kᵀ · scale, as softcap · tanh(· / softcap) where softcap is not 0, plus masks.

    q: a value; keys: a part of the cache; sinks: a weight with a score of no column for each head.
    """

    q: str
    keys: Part
    scale: float
    softcap: float = 0.0
    masks: tuple[Mask, ...] = ()
    sinks: str | None = None

    def scaled(self, factor: float) -> Scores:
        """The scores multiplied by the factor."""
        masks = tuple(mask.scaled(factor) for mask in self.masks)
        return replace(self, scale=self.scale * factor, softcap=self.softcap * factor, masks=masks)


def scores_of(graph: Graph, seen: Observation, presents: Mapping[str, Part], value: str) -> Scores | str:
    """What the value is as scores of attention, up to a number that a row's scores share, or why it is none."""
    node = graph.producer(value)
    unknown = f"the scores come from {node.op if node else value}"
    if node is None:
        return unknown
    if is_kind(node, "MatMul") or is_kind(node, "com.microsoft.FusedMatMul"):
        keys = part_of(graph, presents, node.inputs[1])
        if keys is None or node.attrs.get("transA", 0):
            return "the scores' product is with something else than cached keys"
        q, scale = scaled(graph, node.inputs[0])
        return Scores(q, keys[0], scale * keys[1] * float(node.attrs.get("alpha", 1.0)))
    if any(is_kind(node, kind) for kind in _SAME):
        return scores_of(graph, seen, presents, node.inputs[0])
    if is_kind(node, "Reshape"):
        return scores_of(graph, seen, presents, node.inputs[0]) if keeps_rows(seen, node.inputs[0], value) else unknown
    if is_kind(node, "Where"):
        return _chosen(graph, seen, presents, node)
    if is_kind(node, "Sub"):
        largest = graph.producer(node.inputs[1], "ReduceMax")
        if largest is None or largest.inputs[0] != node.inputs[0] or not _is_last(graph, largest):
            return unknown
        return scores_of(graph, seen, presents, node.inputs[0])
    if is_kind(node, "Concat"):
        return _with_sinks(graph, seen, presents, node)
    if is_kind(node, "Tanh"):
        scores = scores_of(graph, seen, presents, node.inputs[0])
        if isinstance(scores, str):
            return scores
        return unknown if scores.masks or scores.softcap or scores.sinks else replace(scores, softcap=1.0)
    if is_kind(node, "Add") and not any(_number(graph, name) for name in node.inputs):
        return _masked(graph, seen, presents, node) or unknown
    if not (is_kind(node, "Mul") or is_kind(node, "Div")):
        return unknown
    chain, factor = factored(graph, value)
    if chain == value or factor <= 0:
        return unknown
    scores = scores_of(graph, seen, presents, chain)
    if isinstance(scores, str):
        return scores
    return "the scores are scaled after their sinks" if scores.sinks else scores.scaled(factor)


def _number(graph: Graph, name: str) -> bool:
    constant = graph.constant(name)
    return constant is not None and constant.size == 1


def _masked(graph: Graph, seen: Observation, presents: Mapping[str, Part], node) -> Scores | None:
    """Add(scores, mask) and Add(mask, scores)."""
    for chain, mask in (node.inputs, node.inputs[::-1]):
        scores = scores_of(graph, seen, presents, chain)
        if isinstance(scores, Scores) and not scores.sinks:
            return replace(scores, masks=(*scores.masks, Mask(mask, "add")))
    return None


def _chosen(graph: Graph, seen: Observation, presents: Mapping[str, Part], node) -> Scores | str:
    """Where(condition, scores, low) and Where(condition, low, scores)."""
    for chain, low, meaning in ((node.inputs[1], node.inputs[2], "seen"), (node.inputs[2], node.inputs[1], "hidden")):
        constant = graph.constant(low)
        if constant is not None and constant.size == 1 and float(constant.item()) < HIDDEN:
            scores = scores_of(graph, seen, presents, chain)
            if isinstance(scores, str) or scores.sinks:
                return scores if isinstance(scores, str) else "the scores are masked after their sinks"
            return replace(scores, masks=(*scores.masks, Mask(node.inputs[0], meaning, float(constant.item()))))
    return "the scores are chosen by a Where that is no mask"


def _with_sinks(graph: Graph, seen: Observation, presents: Mapping[str, Part], node) -> Scores | str:
    """Concat(scores, sinks) on the last axis, the sinks a weight with a number for each head."""
    before, after = seen.shapes(node.inputs[0]), seen.shapes(node.outputs[0])
    name = node.inputs[-1]
    while (maker := graph.producer(name)) is not None and any(is_kind(maker, kind) for kind in _REPEATS):
        name = maker.inputs[0]
    weight = graph.weight(name)
    wider = before and after and all((*b[:-1], b[-1] + 1) == a for b, a in zip(before, after, strict=True))
    if len(node.inputs) != 2 or weight is None or not before or not wider or weight.size != before[0][1]:
        return "the scores stand beside something that is no weight of a number for each head"
    scores = scores_of(graph, seen, presents, node.inputs[0])
    return scores if isinstance(scores, str) or scores.sinks else replace(scores, sinks=name)


def _is_last(graph: Graph, node) -> bool:
    """Whether the reduction is over the last axis alone and keeps it."""
    axes = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else node.attrs.get("axes")
    return axes is not None and list(axes) == [-1] and bool(node.attrs.get("keepdims", 1))


def keeps_rows(seen: Observation, before: str, after: str) -> bool:
    """Whether both values are, in every trial, stacks of matrices of the same sizes."""
    old, new = seen.shapes(before), seen.shapes(after)
    return bool(old and new) and all(b[-2:] == a[-2:] for b, a in zip(old or (), new or (), strict=True))


def factored(graph: Graph, value: str) -> tuple[str, float]:
    """The value without the constant factor that its node multiplies by or divides by, and that factor."""
    node = graph.producer(value)
    if node is None or not (is_kind(node, "Mul") or is_kind(node, "Div")):
        return value, 1.0
    constants = [graph.constant(name) for name in node.inputs]
    at = next((i for i, c in enumerate(constants) if c is not None and c.size == 1), None)
    if at is None or (is_kind(node, "Div") and at == 0):
        return value, 1.0
    factor = float(constants[at].item())  # type: ignore[union-attr]
    return node.inputs[1 - at], 1 / factor if is_kind(node, "Div") else factor


def scaled(graph: Graph, value: str) -> tuple[str, float]:
    """The value without its constant factors, and their product."""
    scale = 1.0
    while (inner := factored(graph, value))[0] != value:
        value, scale = inner[0], scale * inner[1]
    return value, scale


def part_of(graph: Graph, presents: Mapping[str, Part], value: str) -> tuple[Part, float] | None:
    """The part of the cache that the value is, repeated for the heads that share it, and its constant factor."""
    scale = 1.0
    while value not in presents:
        value, factor = scaled(graph, value)
        scale *= factor
        node = graph.producer(value)
        if value in presents or node is None or not any(is_kind(node, kind) for kind in _REPEATS):
            break
        value = node.inputs[0]
    return (presents[value], scale) if value in presents else None
