"""Operators that are a layer's attention in one node: ONNX's Attention and com.microsoft's MultiHeadAttention."""

from __future__ import annotations

import math
from typing import NamedTuple

from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.passes.attention.attention_context import (
    AttentionContext,
    UnsupportedAttention,
    check_axes,
)
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer, default_scale, unpack_qkv
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.score_masks import (
    AddedMask,
    BooleanMask,
    CausalMask,
    PaddingMask,
    ScoreMask,
    WindowMask,
)
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node

ATTENTION_OPERATORS = (
    "com.microsoft.MultiHeadAttention",
    "com.microsoft.DecoderMaskedMultiHeadAttention",
    "Attention",
)
# Inputs of a cache that is a buffer with a length, or of a beam search inside the graph.
_BUFFER_INPUTS = {"past_sequence_length", "beam_width", "cache_indirection", "nonpad_kv_seqlen"}
# ONNX's own Attention has shorter names for the inputs that com.microsoft's operators have too.
_COMMON_NAMES = {"q": "query", "k": "key", "v": "value", "mask": "attention_bias", "mask_index": "key_padding_mask"}


class _AttentionOperator(NamedTuple):
    """A node that is attention, its inputs and their ranks by common names, and where the cache has keys and values."""

    context: AttentionContext
    node: Node
    inputs: dict[str, str]
    ranks: dict[str, int]
    keys: CachePairView
    values: CachePairView


def match_attention_operator(context: AttentionContext, node: Node) -> AttentionLayer | None:
    """Returns the layer that the node is; None for attention without a part in the cache.

    Raises UnsupportedAttention for attention that cannot run over pools.
    """
    bound = bind_inputs(node)
    inputs = {_COMMON_NAMES.get(name, name): value for name, value in bound.items()}
    if _BUFFER_INPUTS & inputs.keys() or any(node.outputs[3:]):
        raise UnsupportedAttention("its cache is a buffer with a length, or its scores are an output")
    ranks = {name: len(shapes[0]) for name in inputs if (shapes := context.probe.shapes(inputs[name]))}
    if any(ranks.get(name, 3) not in (3, 4) for name in ("query", "key", "value")):
        raise UnsupportedAttention("its queries, keys and values are packed into one input")
    views = _cached_keys_and_values(context, node, inputs)
    if views is None:
        return None
    if "past_key" not in inputs:
        inputs |= {name: context.appended_tokens(view) for name, view in zip(("key", "value"), views, strict=True)}
    for view in views:
        check_axes(view)
    operator = _AttentionOperator(context, node, inputs, ranks, *views)
    if is_op_type(node, "Attention"):
        return _layer_of_onnx_attention(operator)
    return _layer_of_multi_head_attention(operator)


def _cached_keys_and_values(
    context: AttentionContext, node: Node, inputs: dict[str, str]
) -> tuple[CachePairView, CachePairView] | None:
    """Returns where the cache has the node's keys and values; None where it reads neither.

    The node either reads the past and computes the present, or reads the past with the new keys or values appended.
    """
    if "past_key" in inputs:
        pasts = [context.pasts.get(inputs.get(name, "")) for name in ("past_key", "past_value")]
        keys, values = pasts
        if keys is None or values is None or [context.presents.get(name) for name in node.outputs[1:3]] != pasts:
            raise UnsupportedAttention("its past and present are not a cache pair of the graph")
        return keys, values
    presents = [context.cached_value(inputs.get(name, "")) for name in ("key", "value")]
    if presents == [None, None]:
        return None
    keys, values = (present[0] if present and present[1] == 1.0 else None for present in presents)
    if keys is None or values is None or node.attrs.get("is_causal", 0) or node.attrs.get("unidirectional", 0):
        raise UnsupportedAttention("its keys and values are not cached, or its own mask does not count the past")
    return keys, values


def _layer_of_multi_head_attention(operator: _AttentionOperator) -> AttentionLayer:
    """MultiHeadAttention and DecoderMaskedMultiHeadAttention of com.microsoft."""
    node, inputs, keys, values = operator.node, operator.inputs, operator.keys, operator.values
    builder, attrs = NodeBuilder(node.outputs[0]), node.attrs
    heads = int(attrs["num_heads"])
    sizes = [heads * keys.head_dim, heads * keys.head_dim, heads * values.head_dim]
    q, k, v = unpack_qkv(builder, inputs, sizes)
    splits_keys = (
        operator.ranks.get("key") != 4
    )  # keys and values may come with their heads apart, and then have no bias
    if "bias" in inputs:
        biases = builder.add_split(inputs["bias"], sizes, ("q.bias", "k.bias", "v.bias"), axis=0)
        q = builder.add_node("Add-7", (q, biases[0]), "q.biased")
        if splits_keys:
            k = builder.add_node("Add-7", (k, biases[1]), "k.biased")
            v = builder.add_node("Add-7", (v, biases[2]), "v.biased")
    q = builder.add_split_heads(q, heads, "q")
    if splits_keys:
        k, v = builder.add_split_heads(k, heads, "k"), builder.add_split_heads(v, heads, "v")
    masks: list[ScoreMask] = [CausalMask()] if attrs.get("unidirectional", 0) else []
    masks += [AddedMask(inputs["attention_bias"])] if "attention_bias" in inputs else []
    if "key_padding_mask" in inputs:
        masks.append(PaddingMask(inputs["key_padding_mask"], float(attrs.get("mask_filter_value", -10000.0))))
    scale = float(attrs.get("scale", 0.0)) or default_scale(keys.head_dim)
    layer = AttentionLayer(
        root=node,
        q=q,
        k=k,
        v=v,
        cached_keys=keys,
        cached_values=values,
        scale=scale,
        output=node.outputs[0],
        masks=tuple(masks),
    )
    return layer.with_surrounding_nodes(builder, merges_heads=True)


def _layer_of_onnx_attention(operator: _AttentionOperator) -> AttentionLayer:
    """ONNX's own Attention."""
    node, inputs, keys, values = operator.node, operator.inputs, operator.keys, operator.values
    builder, attrs = NodeBuilder(node.outputs[0]), node.attrs
    left, right = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if right > 0:
        raise UnsupportedAttention("its window reaches past a token's own position")
    q, k, v = inputs["query"], inputs["key"], inputs["value"]
    merged = operator.ranks.get("query") == 3
    if merged:
        q = builder.add_split_heads(q, int(attrs["q_num_heads"]), "q")
        if "past_key" in inputs:
            kv_heads = int(attrs["kv_num_heads"])
            k, v = builder.add_split_heads(k, kv_heads, "k"), builder.add_split_heads(v, kv_heads, "v")
    masks: list[ScoreMask] = [CausalMask()] if attrs.get("is_causal", 0) or right == 0 else []
    masks += [WindowMask(window=left + 1)] if left >= 0 else []
    if "attention_bias" in inputs:
        mask = inputs["attention_bias"]
        is_boolean = operator.context.probe.dtype(mask) in ("bool", None)
        masks.append(BooleanMask(mask, visible=True, hidden_bias=-math.inf) if is_boolean else AddedMask(mask))
    scale = default_scale(keys.head_dim) if attrs.get("scale") is None else float(attrs["scale"])
    layer = AttentionLayer(
        root=node,
        q=q,
        k=k,
        v=v,
        cached_keys=keys,
        cached_values=values,
        scale=scale,
        output=node.outputs[0],
        softcap=float(attrs.get("softcap", 0.0)),
        masks=tuple(masks),
    )
    return layer.with_surrounding_nodes(builder, merges_heads=merged)
