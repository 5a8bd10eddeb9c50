"""Attention over pools: past, present, mask and softmax are replaced by attention over the pools of the cache."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import VALUE_KEEPING_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.attention_context import AttentionContext, UnsupportedAttention
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer
from mlx_transmuter.converters.passes.attention.attention_operators import ATTENTION_OPERATORS, match_attention_operator
from mlx_transmuter.converters.passes.attention.attention_scores import keeps_last_two_axes, match_scores
from mlx_transmuter.converters.passes.attention.build_pooled_attention import build_pooled_attention
from mlx_transmuter.program import Node


def fuse_pooled_attention(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces softmax(q · kᵀ · scale + mask) · v over past and present, or one operator for it, by mlx.attention."""
    probe = graph.shape_probe
    if probe is None or probe.signature.uses_pools:
        return
    context, layers = AttentionContext.of_graph(graph, probe), []
    for node in graph.nodes:
        try:
            layer = _match_layer(context, node)
        except UnsupportedAttention as problem:
            yield SkippedMatch(node, str(problem))
            return
        layers += [layer] if layer else []
    if layers:
        yield from build_pooled_attention(graph, probe.signature, layers)


def _match_layer(context: AttentionContext, node: Node) -> AttentionLayer | None:
    """Returns the layer whose softmax or whose operator the node is; None for any other node.

    Raises UnsupportedAttention for attention that cannot run over pools.
    """
    if is_op_type(node, "Softmax"):
        return _match_softmax_attention(context, node)
    if is_op_type(node, *ATTENTION_OPERATORS):
        return match_attention_operator(context, node)
    return None


def _match_softmax_attention(context: AttentionContext, softmax: Node) -> AttentionLayer | None:
    """Returns the layer around a softmax; None for a softmax of something else than attention."""
    shapes = context.probe.shapes(softmax.inputs[0])
    rank = len(shapes[0]) if shapes else 0
    if shapes and all(shape[-1] == shapes[0][-1] for shape in shapes):
        return None  # over the choices of a router, or the like: columns of a cache would be more in a longer step
    axis = softmax.attrs.get("axis", -1)
    if rank not in (3, 4) or axis % rank != rank - 1:
        raise UnsupportedAttention(f"the softmax is over axis {axis} of {rank}")
    scores = match_scores(context, softmax.inputs[0])
    product = _find_value_product(context, softmax.outputs[0], bool(scores.sinks))
    if product is None:
        raise UnsupportedAttention("the attention weights are not multiplied by values")
    values = context.cached_value(product.inputs[1])
    if values is None or values[1] != 1.0:
        raise UnsupportedAttention(
            f"the attention weights are multiplied by {product.inputs[1]!r}, which is not cached"
        )
    return AttentionLayer(
        root=product,
        q=scores.q,
        k=context.appended_tokens(scores.cached_keys),
        v=context.appended_tokens(values[0]),
        cached_keys=scores.cached_keys,
        cached_values=values[0],
        scale=scores.scale,
        output=product.outputs[0],
        softcap=scores.softcap,
        masks=scores.masks,
        sinks=scores.sinks,
    )


def _find_value_product(context: AttentionContext, weights: str, has_sinks: bool) -> Node | None:
    """Returns the product of the attention weights with values, or None.

    Between the two may be casts, the guard against NaN (Where(IsNaN(w), 0, w)), and the Slice that drops the sinks.
    """
    for node in context.graph.consumers(weights):
        if not has_sinks and is_op_type(node, "MatMul") and node.inputs[0] == weights:
            return node
        drops_sinks = has_sinks and _drops_last_column(context.probe, node)
        if drops_sinks or _keeps_weights(context, node, weights):
            product = _find_value_product(context, node.outputs[0], has_sinks and not drops_sinks)
            if product is not None:
                return product
    return None


def _keeps_weights(context: AttentionContext, node: Node, weights: str) -> bool:
    """Returns whether the node's output is the attention weights themselves."""
    if is_op_type(node, "Where"):
        return node.inputs[2] == weights and context.graph.producer(node.inputs[0], "IsNaN") is not None
    if is_op_type(node, "Reshape"):
        return keeps_last_two_axes(context.probe, weights, node.outputs[0])
    return is_op_type(node, *VALUE_KEEPING_OPS)


def _drops_last_column(probe: ShapeProbe, node: Node) -> bool:
    """Returns whether the node is a Slice of all but the last element of the last axis, where the sinks are."""
    if not is_op_type(node, "Slice"):
        return False
    before, after = probe.shapes(node.inputs[0]), probe.shapes(node.outputs[0])
    shorter = before and after and all((*a[:-1], a[-1] + 1) == b for b, a in zip(before, after, strict=True))
    starts = probe.constant_value(node.inputs[1])
    return bool(shorter) and starts is not None and not starts.any()
