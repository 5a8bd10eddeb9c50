"""Attention: past, present, mask and softmax become attention over the pools of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from converters.match import Answer, Declined, Graph, is_kind
from converters.observe import Observation
from converters.passes.layers import Layer, over_pools
from converters.passes.past import Part, fresh, parts
from converters.passes.scores import keeps_rows, part_of, scores_of
from converters.passes.whole import KINDS, whole
from mlx_transmuter.program import Node


def attention(graph: Graph) -> Iterator[Answer]:
    """softmax(q · kᵀ · scale + mask) · v over past and present, or one operator for it → mlx.attention over pools."""
    seen = graph.observation
    if seen is None or seen.signature.index:
        return
    pasts, presents = parts(graph, seen.signature)
    layers = []
    for node in graph.nodes:
        if is_kind(node, "Softmax"):
            found = _layer(graph, seen, pasts, presents, node)
        elif any(is_kind(node, kind) for kind in KINDS):
            found = whole(graph, seen, pasts, presents, node)
        else:
            continue
        if isinstance(found, str):
            yield Declined(node, found)
            return
        layers += [found] if found else []
    if layers:
        yield from over_pools(graph, seen.signature, layers)


def _layer(
    graph: Graph, seen: Observation, pasts: dict[str, Part], presents: Mapping[str, Part], softmax: Node
) -> Layer | str | None:
    """The layer around a softmax, or why it is none; None for a softmax of something else than attention."""
    shapes = seen.shapes(softmax.inputs[0])
    rank = len(shapes[0]) if shapes else 0
    if shapes and all(one[-1] == shapes[0][-1] for one in shapes):
        return None  # over the choices of a router, or the like: columns of a cache would be more in a longer step
    if rank not in (3, 4) or softmax.attrs.get("axis", -1) % rank != rank - 1:
        return f"the softmax is over axis {softmax.attrs.get('axis', -1)} of {rank}"
    scores = scores_of(graph, seen, presents, softmax.inputs[0])
    if isinstance(scores, str):
        return scores
    product = _product(graph, seen, softmax.outputs[0], bool(scores.sinks))
    if product is None:
        return "the weights go elsewhere than into a product with values"
    values = part_of(graph, presents, product.inputs[1])
    if values is None or values[1] != 1.0:
        return f"the weights' product is with {product.inputs[1]!r}, which is no cache"
    new = []
    for part in (scores.keys, values[0]):
        name = next(name for name, one in presents.items() if one == part)
        new.append(fresh(graph, pasts, name, part))
        if new[-1] is None:
            return f"{name!r} is not the past with the new keys or values after it"
        if len(part.order) != 4:
            return f"{part.entry.past!r} is not of rows, heads, positions and a size"
    k, v = new
    return Layer(
        product, scores.q, k, v, scores.keys, values[0], scores.scale, product.outputs[0],
        scores.softcap, scores.masks, scores.sinks,
    )  # fmt: skip


def _product(graph: Graph, seen: Observation, weights: str, sinks: bool) -> Node | None:
    """The product of the weights with values, past casts and the guard against NaN (Where(IsNaN(w), 0, w)), and
    without the column of the sinks.
    """
    for node in graph.consumers(weights):
        if not sinks and is_kind(node, "MatMul") and node.inputs[0] == weights:
            return node
        plain = any(is_kind(node, kind) for kind in ("Cast", "Dropout", "Identity"))
        guard = (
            is_kind(node, "Where") and node.inputs[2] == weights and graph.producer(node.inputs[0], "IsNaN") is not None
        )
        same = is_kind(node, "Reshape") and keeps_rows(seen, weights, node.outputs[0])
        cut = sinks and _without_last(seen, node)
        if (plain or guard or same or cut) and (found := _product(graph, seen, node.outputs[0], sinks and not cut)):
            return found
    return None


def _without_last(seen: Observation, node: Node) -> bool:
    """Whether the node is a Slice of all but the last of the last axis, where the sinks stand."""
    if not is_kind(node, "Slice"):
        return False
    before, after = seen.shapes(node.inputs[0]), seen.shapes(node.outputs[0])
    cut = before and after and all((*a[:-1], a[-1] + 1) == b for b, a in zip(before, after, strict=True))
    starts = seen.constant(node.inputs[1])
    return bool(cut) and starts is not None and not starts.any()
