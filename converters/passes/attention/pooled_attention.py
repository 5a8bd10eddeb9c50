"""Attention: past, present, mask and softmax become attention over the pools of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer, build_pooled_attention
from mlx_transmuter.converters.passes.attention.attention_operators import ATTENTION_OPERATORS, match_attention_operator
from mlx_transmuter.converters.passes.attention.attention_scores import (
    find_cache_view,
    keeps_last_two_axes,
    match_scores,
)
from mlx_transmuter.converters.passes.attention.cache_pair_views import (
    CachePairView,
    find_appended_value,
    find_cache_views,
)
from mlx_transmuter.program import Node


def fuse_pooled_attention(graph: GraphView) -> Iterator[MatchOutcome]:
    """softmax(q · kᵀ · scale + mask) · v over past and present, or one operator for it → mlx.attention over pools."""
    seen = graph.shape_probe
    if seen is None or seen.signature.uses_pools:
        return
    pasts, presents = find_cache_views(graph, seen.signature)
    layers = []
    for node in graph.nodes:
        if is_op_type(node, "Softmax"):
            found = _match_softmax_attention(graph, seen, pasts, presents, node)
        elif is_op_type(node, *ATTENTION_OPERATORS):
            found = match_attention_operator(graph, seen, pasts, presents, node)
        else:
            continue
        if isinstance(found, str):
            yield SkippedMatch(node, found)
            return
        layers += [found] if found else []
    if layers:
        yield from build_pooled_attention(graph, seen.signature, layers)


def _match_softmax_attention(
    graph: GraphView,
    probe: ShapeProbe,
    pasts: dict[str, CachePairView],
    presents: Mapping[str, CachePairView],
    softmax: Node,
) -> AttentionLayer | str | None:
    """The layer around a softmax, or why it is none; None for a softmax of something else than attention."""
    shapes = probe.shapes(softmax.inputs[0])
    rank = len(shapes[0]) if shapes else 0
    if shapes and all(one[-1] == shapes[0][-1] for one in shapes):
        return None  # over the choices of a router, or the like: columns of a cache would be more in a longer step
    if rank not in (3, 4) or softmax.attrs.get("axis", -1) % rank != rank - 1:
        return f"the softmax is over axis {softmax.attrs.get('axis', -1)} of {rank}"
    scores = match_scores(graph, probe, presents, softmax.inputs[0])
    if isinstance(scores, str):
        return scores
    product = _find_value_product(graph, probe, softmax.outputs[0], bool(scores.sinks))
    if product is None:
        return "the weights go elsewhere than into a product with values"
    values = find_cache_view(graph, presents, product.inputs[1])
    if values is None or values[1] != 1.0:
        return f"the weights' product is with {product.inputs[1]!r}, which is no cache"
    new = []
    for part in (scores.cached_keys, values[0]):
        name = next(name for name, one in presents.items() if one == part)
        new.append(find_appended_value(graph, pasts, name, part))
        if new[-1] is None:
            return f"{name!r} is not the past with the new keys or values after it"
        if len(part.axis_order) != 4:
            return f"{part.pair.past!r} is not of rows, heads, positions and a size"
    k, v = new
    return AttentionLayer(
        product, scores.q, k, v, scores.cached_keys, values[0], scores.scale, product.outputs[0],
        scores.softcap, scores.masks, scores.sinks,
    )  # fmt: skip


def _find_value_product(graph: GraphView, probe: ShapeProbe, weights: str, has_sinks: bool) -> Node | None:
    """The product of the weights with values, past casts and the guard against NaN (Where(IsNaN(w), 0, w)), and
    without the column of the sinks.
    """
    for node in graph.consumers(weights):
        if not has_sinks and is_op_type(node, "MatMul") and node.inputs[0] == weights:
            return node
        plain = is_op_type(node, "Cast", "Dropout", "Identity")
        guard = (
            is_op_type(node, "Where")
            and node.inputs[2] == weights
            and graph.producer(node.inputs[0], "IsNaN") is not None
        )
        same = is_op_type(node, "Reshape") and keeps_last_two_axes(probe, weights, node.outputs[0])
        cut = has_sinks and _drops_sink_column(probe, node)
        if (plain or guard or same or cut) and (
            found := _find_value_product(graph, probe, node.outputs[0], has_sinks and not cut)
        ):
            return found
    return None


def _drops_sink_column(probe: ShapeProbe, node: Node) -> bool:
    """Whether the node is a Slice of all but the last of the last axis, where the sinks stand."""
    if not is_op_type(node, "Slice"):
        return False
    before, after = probe.shapes(node.inputs[0]), probe.shapes(node.outputs[0])
    cut = before and after and all((*a[:-1], a[-1] + 1) == b for b, a in zip(before, after, strict=True))
    starts = probe.constant_value(node.inputs[1])
    return bool(cut) and starts is not None and not starts.any()
