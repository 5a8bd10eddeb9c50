"""Group query attention: com.microsoft's GroupQueryAttention, with its own cache, rotation and mask, over the pools."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, SkippedMatch
from mlx_transmuter.converters.passes.attention.attention_layer import AttentionLayer, default_scale, unpack_qkv
from mlx_transmuter.converters.passes.attention.build_pooled_attention import build_pooled_attention
from mlx_transmuter.converters.passes.attention.cache_pair_views import CachePairView
from mlx_transmuter.converters.passes.attention.score_masks import AddedMask, CausalMask, ScoreMask, WindowMask
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node
from mlx_transmuter.program.signature import CACHE_INDEX_INPUT, CachePair

_OPERATOR = "com.microsoft.GroupQueryAttention"
_UNSUPPORTED_INPUTS = {"k_scale", "v_scale", "query_seqlens"}
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
    """Replaces GroupQueryAttention(q, k, v, past) by rotation and mlx.attention over pools, at the index positions."""
    nodes = [node for node in graph.nodes if is_op_type(node, _OPERATOR)]
    probe = graph.shape_probe if nodes else None
    if probe is None or probe.signature.uses_pools:
        return
    cache_pairs = {pair.past: pair for pair in probe.signature.cache_pairs}
    layers = []
    for node in nodes:
        inputs = bind_inputs(node)
        problem = _unsupported_reason(node, inputs, cache_pairs)
        if problem:
            yield SkippedMatch(node, problem)
            return
        layers.append(_attention_layer(node, inputs, cache_pairs))
    yield from build_pooled_attention(graph, probe.signature, layers)


def _unsupported_reason(node: Node, inputs: dict[str, str], cache_pairs: dict[str, CachePair]) -> str | None:
    """Returns why the node cannot run over pools, or None where it can."""
    if unsupported := sorted(_UNSUPPORTED_INPUTS & inputs.keys()):
        return f"it has the input {unsupported[0]}"
    for name, value in node.attrs.items():
        if name not in _SUPPORTED_ATTRIBUTES and value not in _NEUTRAL_ATTRIBUTE_VALUES.get(name, ()):
            return f"its attribute {name} is {value!r}"
    if not all(inputs.get(name) in cache_pairs for name in ("past_key", "past_value")) or any(node.outputs[3:]):
        return "its past is not an input of the graph, or its scores are an output"
    if ("key" in inputs) != ("value" in inputs):
        return "it has only one of keys and values"
    return None


def _attention_layer(node: Node, inputs: dict[str, str], cache_pairs: dict[str, CachePair]) -> AttentionLayer:
    attrs, builder = node.attrs, NodeBuilder(node.outputs[0])
    keys, values = CachePairView(cache_pairs[inputs["past_key"]]), CachePairView(cache_pairs[inputs["past_value"]])
    heads, kv_heads = int(attrs["num_heads"]), int(attrs["kv_num_heads"])
    sizes = [heads * keys.head_dim, kv_heads * keys.head_dim, kv_heads * values.head_dim]
    q, k, v = unpack_qkv(builder, inputs, sizes)
    q, k, v = (
        builder.add_split_heads(x, count, name)
        for name, x, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads))
    )
    q, k = _normed(node, inputs, builder, q, k)
    q, k = _rotated(node, inputs, builder, q, k)
    window = int(attrs.get("local_window_size", -1))
    masks: list[ScoreMask] = [CausalMask()]
    masks += [WindowMask(window=window)] if window > 0 else []
    masks += [AddedMask(inputs["attention_bias"])] if "attention_bias" in inputs else []
    sinks = inputs.get("head_sink")
    if sinks is None and attrs.get("smooth_softmax", 0) == 1:
        sinks = builder.add_constant("sinks", np.zeros(heads, np.float32))
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
        softcap=float(attrs.get("softcap", 0.0)),
        masks=tuple(masks),
        sinks=sinks,
    )
    return layer.with_surrounding_nodes(builder, merges_heads=True)


def _normed(node: Node, inputs: dict[str, str], builder: NodeBuilder, q: str, k: str) -> tuple[str, str]:
    """Returns queries and keys after the operator's own RMS norm of each head, if it has one."""
    if "q_norm_weight" not in inputs or "k_norm_weight" not in inputs:
        return q, k
    eps = float(node.attrs.get("qk_norm_epsilon", 1e-6))
    q_eps, k_eps = (float(node.attrs.get(f"{part}_norm_epsilon", eps)) for part in "qk")
    return (
        builder.add_node("mlx.rms_norm", (q, inputs["q_norm_weight"]), "q.normed", eps=q_eps),
        builder.add_node("mlx.rms_norm", (k, inputs["k_norm_weight"]), "k.normed", eps=k_eps),
    )


def _rotated(node: Node, inputs: dict[str, str], builder: NodeBuilder, q: str, k: str) -> tuple[str, str]:
    """Returns queries and keys after the operator's own rotation, if it has one; without positions, at the index's."""
    if not node.attrs.get("do_rotary", 0):
        return q, k
    positions = inputs.get("position_ids")
    if positions is None:
        positions = _INDEX_POSITIONS
        builder.nodes.append(Node("mlx.positions", (CACHE_INDEX_INPUT,), (positions,)))
    interleaved = int(node.attrs.get("rotary_interleaved", 0))
    tables = (positions, inputs["cos_cache"], inputs["sin_cache"])
    q, k = (
        builder.add_node("com.microsoft.RotaryEmbedding-1", (x, *tables), f"{part}.rotated", interleaved=interleaved)
        for part, x in (("q", q), ("k", k))
    )
    return q, k
