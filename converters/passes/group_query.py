"""Group query: onnxruntime's GroupQueryAttention, which brings its own cache, rotation and mask, over the pools."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from converters.match import Answer, Declined, Graph, is_kind
from converters.passes.layers import Layer, over_pools
from converters.passes.masks import Mask
from converters.passes.past import Part
from converters.passes.whole import Parts, joined
from mlx_transmuter.program import Node
from mlx_transmuter.signature import INDEX, Entry

_KIND = "com.microsoft.GroupQueryAttention"
_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "lengths", "total", "cos", "sin", "positions", "added", "sinks",
    "k_scale", "v_scale", "q_norm", "k_norm", "counts",
)  # fmt: skip
_UNKNOWN = {"k_scale", "v_scale", "counts"}
# Attributes that the rewrite has a form of; another one must have no effect.
_KNOWN = {
    "num_heads", "kv_num_heads", "scale", "softcap", "local_window_size", "do_rotary", "rotary_interleaved",
    "q_norm_epsilon", "k_norm_epsilon", "qk_norm_epsilon",
}  # fmt: skip
_NEUTRAL = {
    "smooth_softmax": (-1, 0, 1),
    "qk_output": (0,),
    "causal": (1,),
    "k_quant_type": ("NONE",),
    "v_quant_type": ("NONE",),
    "kv_cache_bit_width": (0,),
    "sliding_window_cache": (0,),
}
_POSITIONS = "index.positions"


def group_query(graph: Graph) -> Iterator[Answer]:
    """GroupQueryAttention(q, k, v, past) → rotary and mlx.attention over pools, at the index's positions."""
    nodes = [node for node in graph.nodes if is_kind(node, _KIND)]
    seen = graph.observation if nodes else None
    if seen is None or seen.signature.index:
        return
    entries = {entry.past: entry for entry in seen.signature.entries}
    layers = []
    for node in nodes:
        given = {name: value for name, value in zip(_INPUTS, node.inputs, strict=False) if value}
        problem = _problem(node, given, entries)
        if problem:
            yield Declined(node, problem)
            return
        layers.append(_layer(node, given, entries))
    yield from over_pools(graph, seen.signature, layers)


def _problem(node: Node, given: dict[str, str], entries: dict[str, Entry]) -> str | None:
    """Why the node can't run over pools, or None."""
    if unknown := sorted(_UNKNOWN & given.keys()):
        return f"it has {unknown[0]}"
    for name, value in node.attrs.items():
        if name not in _KNOWN and value not in _NEUTRAL.get(name, ()):
            return f"its {name} is {value!r}"
    if given.get("past_key") not in entries or given.get("past_value") not in entries or any(node.outputs[3:]):
        return "its past is no input of the graph, or its scores are wanted"
    if ("key" in given) != ("value" in given):
        return "it has keys or values alone"
    return None


def _layer(node: Node, given: dict[str, str], entries: dict[str, Entry]) -> Layer:
    attrs, made = node.attrs, Parts(node.outputs[0])
    keys, values = Part(entries[given["past_key"]]), Part(entries[given["past_value"]])
    counts = {"q": int(attrs["num_heads"]), "k": int(attrs["kv_num_heads"]), "v": int(attrs["kv_num_heads"])}
    flat = [given["query"], given.get("key", ""), given.get("value", "")]
    if not flat[1]:
        sizes = [counts["q"] * keys.size, counts["k"] * keys.size, counts["v"] * values.size]
        flat = made.split(flat[0], sizes, ("q.flat", "k.flat", "v.flat"))
    q, k, v = (made.heads(x, counts[part], part) for part, x in zip("qkv", flat, strict=True))
    if "q_norm" in given and "k_norm" in given:
        eps = float(attrs.get("qk_norm_epsilon", 1e-6))
        q_eps, k_eps = (float(attrs.get(f"{part}_norm_epsilon", eps)) for part in "qk")
        q = made.node("mlx.rms_norm", (q, given["q_norm"]), "q.normed", eps=q_eps)
        k = made.node("mlx.rms_norm", (k, given["k_norm"]), "k.normed", eps=k_eps)
    if attrs.get("do_rotary", 0):
        places = given.get("positions")
        if places is None:
            places = _POSITIONS
            made.nodes.append(Node("mlx.positions", (INDEX,), (places,)))
        interleaved = int(attrs.get("rotary_interleaved", 0))
        tables = (places, given["cos"], given["sin"])
        q, k = (
            made.node("com.microsoft.RotaryEmbedding-1", (x, *tables), f"{part}.rotated", interleaved=interleaved)
            for part, x in (("q", q), ("k", k))
        )
    window = int(attrs.get("local_window_size", -1))
    masks = [Mask("", "causal")]
    masks += [Mask("", "window", window)] if window > 0 else []
    masks += [Mask(given["added"], "add")] if "added" in given else []
    sinks = given.get("sinks")
    if sinks is None and attrs.get("smooth_softmax", 0) == 1:
        sinks = made.constant("sinks", np.zeros(counts["q"], np.float32))
    scale = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(keys.size)
    output, after, shape = joined(node.outputs[0])
    return Layer(
        node, q, k, v, keys, values, scale, output, float(attrs.get("softcap", 0.0)), tuple(masks), sinks,
        before=tuple(made.nodes), after=after, constants=made.constants | shape,
    )  # fmt: skip
