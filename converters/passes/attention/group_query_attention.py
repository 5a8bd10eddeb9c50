"""Group query: onnxruntime's GroupQueryAttention, which brings its own cache, rotation and mask, over the pools."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, SkippedMatch
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer, build_pooled_attention
from mlx_transmuter.converters.passes.attention.attention_operators import build_merge_heads
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.masks import ScoreMask
from mlx_transmuter.program import Node
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, CachePair

_OPERATOR = "com.microsoft.GroupQueryAttention"
_INPUT_NAMES = (
    "query", "key", "value", "past_key", "past_value", "lengths", "total", "cos", "sin", "positions", "added", "sinks",
    "k_scale", "v_scale", "q_norm", "k_norm", "counts",
)  # fmt: skip
_UNSUPPORTED_INPUTS = {"k_scale", "v_scale", "counts"}
# Attributes that the rewrite has a form of; another one must have no effect.
_SUPPORTED_ATTRIBUTES = {
    "num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved",
    "q_norm_epsilon", "k_norm_epsilon", "qk_norm_epsilon",
}  # fmt: skip
_NEUTRAL_ATTRIBUTE_VALUES = {
    "smooth_softmax": (-1, 0, 1),
    "qk_output": (0,),
    "causal": (1,),
    "k_quant_type": ("NONE",),
    "v_quant_type": ("NONE",),
    "kv_cache_bit_width": (0,),
    "sliding_window_cache": (0,),
}
_INDEX_POSITIONS = "index.positions"


def lower_group_query_attention(graph: GraphView) -> Iterator[MatchOutcome]:
    """GroupQueryAttention(q, k, v, past) → rotary and mlx.attention over pools, at the index's positions."""
    nodes = [node for node in graph.nodes if is_op_type(node, _OPERATOR)]
    seen = graph.shape_probe if nodes else None
    if seen is None or seen.signature.uses_pools:
        return
    entries = {entry.past: entry for entry in seen.signature.cache_pairs}
    layers = []
    for node in nodes:
        given = {name: value for name, value in zip(_INPUT_NAMES, node.inputs, strict=False) if value}
        problem = _unsupported_reason(node, given, entries)
        if problem:
            yield SkippedMatch(node, problem)
            return
        layers.append(_attention_layer(node, given, entries))
    yield from build_pooled_attention(graph, seen.signature, layers)


def _unsupported_reason(node: Node, inputs: dict[str, str], cache_pairs: dict[str, CachePair]) -> str | None:
    """Why the node can't run over pools, or None."""
    if unknown := sorted(_UNSUPPORTED_INPUTS & inputs.keys()):
        return f"it has {unknown[0]}"
    for name, value in node.attrs.items():
        if name not in _SUPPORTED_ATTRIBUTES and value not in _NEUTRAL_ATTRIBUTE_VALUES.get(name, ()):
            return f"its {name} is {value!r}"
    if (
        inputs.get("past_key") not in cache_pairs
        or inputs.get("past_value") not in cache_pairs
        or any(node.outputs[3:])
    ):
        return "its past is no input of the graph, or its scores are wanted"
    if ("key" in inputs) != ("value" in inputs):
        return "it has keys or values alone"
    return None


def _attention_layer(node: Node, inputs: dict[str, str], cache_pairs: dict[str, CachePair]) -> AttentionLayer:
    attrs, made = node.attrs, NodeBuilder(node.outputs[0])
    keys, values = CachePairView(cache_pairs[inputs["past_key"]]), CachePairView(cache_pairs[inputs["past_value"]])
    counts = {"q": int(attrs["num_heads"]), "k": int(attrs["kv_num_heads"]), "v": int(attrs["kv_num_heads"])}
    flat = [inputs["query"], inputs.get("key", ""), inputs.get("value", "")]
    if not flat[1]:
        sizes = [counts["q"] * keys.head_dim, counts["k"] * keys.head_dim, counts["v"] * values.head_dim]
        flat = made.add_split(flat[0], sizes, ("q.flat", "k.flat", "v.flat"))
    q, k, v = (made.add_split_heads(x, counts[part], part) for part, x in zip("qkv", flat, strict=True))
    if "q_norm" in inputs and "k_norm" in inputs:
        eps = float(attrs.get("qk_norm_epsilon", 1e-6))
        q_eps, k_eps = (float(attrs.get(f"{part}_norm_epsilon", eps)) for part in "qk")
        q = made.add_node("mlx.rms_norm", (q, inputs["q_norm"]), "q.normed", eps=q_eps)
        k = made.add_node("mlx.rms_norm", (k, inputs["k_norm"]), "k.normed", eps=k_eps)
    if attrs.get("do_rotary", 0):
        places = inputs.get("positions")
        if places is None:
            places = _INDEX_POSITIONS
            made.nodes.append(Node("mlx.positions", (CACHE_INDEX_INPUT,), (places,)))
        interleaved = int(attrs.get("rotary_interleaved", 0))
        tables = (places, inputs["cos"], inputs["sin"])
        q, k = (
            made.add_node("com.microsoft.RotaryEmbedding-1", (x, *tables), f"{part}.rotated", interleaved=interleaved)
            for part, x in (("q", q), ("k", k))
        )
    window = int(attrs.get("local_window_size", -1))
    masks = [ScoreMask("", "causal")]
    masks += [ScoreMask("", "window", window)] if window > 0 else []
    masks += [ScoreMask(inputs["added"], "add")] if "added" in inputs else []
    sinks = inputs.get("sinks")
    if sinks is None and attrs.get("smooth_softmax", 0) == 1:
        sinks = made.add_constant("sinks", np.zeros(counts["q"], np.float32))
    scale = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(keys.head_dim)
    output, after, shape = build_merge_heads(node.outputs[0])
    return AttentionLayer(
        node, q, k, v, keys, values, scale, output, float(attrs.get("softcap", 0.0)), tuple(masks), sinks,
        nodes_before=tuple(made.nodes), nodes_after=after, constants=made.constants | shape,
    )  # fmt: skip
