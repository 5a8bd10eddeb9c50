"""Whole: operators that are a layer's attention in one node, as layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer
from mlx_transmuter.converters.passes.attention.attention_scores import find_cache_view
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView, find_appended_value
from mlx_transmuter.converters.passes.attention.masks import ScoreMask
from mlx_transmuter.program import Node

MULTI_HEAD_ATTENTION = "com.microsoft.MultiHeadAttention"
DECODER_MASKED_ATTENTION = "com.microsoft.DecoderMaskedMultiHeadAttention"
ATTENTION_OPERATORS = (MULTI_HEAD_ATTENTION, DECODER_MASKED_ATTENTION, "Attention")
_INPUT_NAMES = {
    MULTI_HEAD_ATTENTION: (
        "query", "key", "value", "bias", "padding", "added", "past_key", "past_value", "length", "beams",
    ),
    DECODER_MASKED_ATTENTION: (
        "query", "key", "value", "padding", "added", "past_key", "past_value", "length", "width", "beams", "bias",
    ),
    "Attention": ("query", "key", "value", "added", "past_key", "past_value", "length"),
}  # fmt: skip


def build_merge_heads(output: str) -> tuple[str, tuple[Node, ...], dict[str, np.ndarray]]:
    """The value [rows, heads, seq, size] that `output`, [rows, seq, heads · size], is made of; the nodes; constants."""
    shape, heads, turned = (f"{output}.{name}" for name in ("shape", "heads", "turned"))
    nodes = (
        Node("Transpose-1", (heads,), (turned,), {"perm": [0, 2, 1, 3]}),
        Node("Reshape-5", (turned, shape), (output,)),
    )
    return heads, nodes, {shape: np.array([0, 0, -1], np.int64)}


def match_attention_operator(
    graph: GraphView,
    probe: ShapeProbe,
    pasts: Mapping[str, CachePairView],
    presents: Mapping[str, CachePairView],
    node: Node,
) -> AttentionLayer | str | None:
    """The layer that the node is, or why it is none; None for attention that has no part in the cache."""
    kind = next(kind for kind in ATTENTION_OPERATORS if is_op_type(node, kind))
    given = {name: value for name, value in zip(_INPUT_NAMES[kind], node.inputs, strict=False) if value}
    if {"length", "beams", "width"} & given.keys() or any(node.outputs[3:]):
        return "its cache is a buffer with a length, or its scores are wanted"
    ranks = {name: len(shapes[0]) for name in given if (shapes := probe.shapes(given[name]))}
    if any(ranks.get(name, 3) not in (3, 4) for name in ("query", "key", "value")):
        return "its queries, keys and values are packed"
    found = _match_cached_keys_and_values(graph, pasts, presents, node, given)
    if found is None or isinstance(found, str):
        return found
    return (_layer_from_onnx_attention if kind == "Attention" else _layer_from_multi_head)(
        probe, node, given, ranks, *found
    )


def _match_cached_keys_and_values(
    graph: GraphView,
    pasts: Mapping[str, CachePairView],
    presents: Mapping[str, CachePairView],
    node: Node,
    inputs: dict[str, str],
) -> tuple[CachePairView, CachePairView] | str | None:
    """Where the cache has the node's keys and values; `given` then has this step's. The node may bring the past, or
    get it with the new keys and values after it.
    """
    if "past_key" in inputs:
        found = [pasts.get(inputs.get(name, "")) for name in ("past_key", "past_value")]
        if None in found or [presents.get(name) for name in node.outputs[1:3]] != found:
            return "its past and present are not the cache's"
    else:
        kept = [find_cache_view(graph, presents, inputs.get(name, "")) for name in ("key", "value")]
        if kept == [None, None]:
            return None
        found = [part[0] if part and part[1] == 1.0 else None for part in kept]
        if None in found or node.attrs.get("is_causal", 0) or node.attrs.get("unidirectional", 0):
            return "its keys and values are no cache, or its own mask doesn't count the past"
        for name, part in zip(("key", "value"), found, strict=True):
            place = next(value for value, one in presents.items() if one == part)
            new = find_appended_value(graph, pasts, place, part)  # type: ignore[arg-type]
            if new is None:
                return f"{place!r} is not the past with the new keys or values after it"
            inputs[name] = new
    keys, values = found
    if keys is None or values is None or len(keys.axis_order) != 4 or len(values.axis_order) != 4:
        return "its past is not of rows, heads, positions and a size"
    return keys, values


def _layer_from_multi_head(
    probe: ShapeProbe,
    node: Node,
    inputs: dict[str, str],
    ranks: dict[str, int],
    keys: CachePairView,
    values: CachePairView,
) -> AttentionLayer | str:
    """MultiHeadAttention and DecoderMaskedMultiHeadAttention."""
    made, attrs = NodeBuilder(node.outputs[0]), node.attrs
    heads, size = int(attrs["num_heads"]), keys.head_dim
    sizes = [heads * size, heads * size, heads * values.head_dim]
    flat = [inputs["query"], inputs.get("key", ""), inputs.get("value", "")]
    if not flat[1]:
        flat = made.add_split(flat[0], sizes, ("q.flat", "k.flat", "v.flat"))
    apart = ranks.get("key") == 4
    if "bias" in inputs:
        biases = made.add_split(inputs["bias"], sizes, ("q.bias", "k.bias", "v.bias"), axis=0)
        pairs = zip("qkv", flat, biases, strict=True)
        flat = [x if apart and n != "q" else made.add_node("Add-7", (x, bias), f"{n}.biased") for n, x, bias in pairs]
    q = made.add_split_heads(flat[0], heads, "q")
    k, v = flat[1:] if apart else (made.add_split_heads(x, heads, n) for n, x in zip("kv", flat[1:], strict=True))
    masks = [ScoreMask("", "causal")] if attrs.get("unidirectional", 0) else []
    masks += [ScoreMask(inputs["added"], "add")] if "added" in inputs else []
    if "padding" in inputs:
        masks.append(ScoreMask(inputs["padding"], "padding", float(attrs.get("mask_filter_value", -10000.0))))
    scale = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(size)
    output, after, shape = build_merge_heads(node.outputs[0])
    return AttentionLayer(
        node, q, k, v, keys, values, scale, output, masks=tuple(masks),
        nodes_before=tuple(made.nodes), nodes_after=after, constants=made.constants | shape,
    )  # fmt: skip


def _layer_from_onnx_attention(
    probe: ShapeProbe,
    node: Node,
    inputs: dict[str, str],
    ranks: dict[str, int],
    keys: CachePairView,
    values: CachePairView,
) -> AttentionLayer | str:
    """ONNX's own Attention."""
    made, attrs = NodeBuilder(node.outputs[0]), node.attrs
    left, right = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if right > 0:
        return "its tokens see columns after their own"
    flat = ranks.get("query") == 3
    q, k, v = inputs["query"], inputs["key"], inputs["value"]
    if flat:
        q = made.add_split_heads(q, int(attrs["q_num_heads"]), "q")
        if "past_key" in inputs:
            k, v = (made.add_split_heads(x, int(attrs["kv_num_heads"]), n) for n, x in (("k", k), ("v", v)))
    masks = [ScoreMask("", "causal")] if attrs.get("is_causal", 0) or right == 0 else []
    masks += [ScoreMask("", "window", left + 1)] if left >= 0 else []
    if "added" in inputs:
        chosen = probe.dtype(inputs["added"]) in ("bool", None)
        masks.append(ScoreMask(inputs["added"], "seen", -math.inf) if chosen else ScoreMask(inputs["added"], "add"))
    scale = attrs.get("scale")
    scale = 1 / math.sqrt(keys.head_dim) if scale is None else float(scale)
    output, after, shape = build_merge_heads(node.outputs[0]) if flat else (node.outputs[0], (), {})
    return AttentionLayer(
        node, q, k, v, keys, values, scale, output, float(attrs.get("softcap", 0.0)), tuple(masks),
        nodes_before=tuple(made.nodes), nodes_after=after, constants=made.constants | shape,
    )  # fmt: skip
