"""Whole: operators that are a layer's attention in one node, as layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from converters.match import Graph, is_kind
from converters.observe import Observation
from converters.passes.layers import Layer
from converters.passes.masks import Mask
from converters.passes.past import Part, fresh
from converters.passes.scores import part_of
from mlx_transmuter.program import Node

MULTI_HEAD = "com.microsoft.MultiHeadAttention"
DECODER_MASKED = "com.microsoft.DecoderMaskedMultiHeadAttention"
KINDS = (MULTI_HEAD, DECODER_MASKED, "Attention")
_INPUTS = {
    MULTI_HEAD: ("query", "key", "value", "bias", "padding", "added", "past_key", "past_value", "length", "beams"),
    DECODER_MASKED: (
        "query", "key", "value", "padding", "added", "past_key", "past_value", "length", "width", "beams", "bias",
    ),
    "Attention": ("query", "key", "value", "added", "past_key", "past_value", "length"),
}  # fmt: skip


@dataclass
class Parts:
    """The nodes around a layer's attention as they are made; names begin with that of the operator's output."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def constant(self, name: str, values) -> str:
        """The name of a constant with the values, int64 where they are integers."""
        self.constants[f"{self.name}.{name}"] = np.array(values)
        return f"{self.name}.{name}"

    def node(self, op: str, inputs: tuple[str, ...], output: str, **attrs) -> str:
        """The name of the output of a node."""
        self.nodes.append(Node(op, inputs, (f"{self.name}.{output}",), attrs))
        return f"{self.name}.{output}"

    def split(self, value: str, sizes: list[int], outputs: tuple[str, ...], axis: int = -1) -> list[str]:
        """The names of the value's pieces of those sizes on an axis."""
        names = tuple(f"{self.name}.{output}" for output in outputs)
        given = self.constant(f"{outputs[0]}.sizes", np.array(sizes, np.int64))
        self.nodes.append(Node("Split-18", (value, given), names, {"axis": axis}))
        return list(names)

    def heads(self, value: str, count: int, output: str) -> str:
        """The value [rows, seq, heads · size] as [rows, heads, seq, size]."""
        shape = self.constant(f"{output}.shape", np.array([0, 0, count, -1], np.int64))
        apart = self.node("Reshape-5", (value, shape), f"{output}.4")
        return self.node("Transpose-1", (apart,), output, perm=[0, 2, 1, 3])


def joined(output: str) -> tuple[str, tuple[Node, ...], dict[str, np.ndarray]]:
    """The value [rows, heads, seq, size] that `output`, [rows, seq, heads · size], is made of; the nodes; constants."""
    shape, heads, turned = (f"{output}.{name}" for name in ("shape", "heads", "turned"))
    nodes = (
        Node("Transpose-1", (heads,), (turned,), {"perm": [0, 2, 1, 3]}),
        Node("Reshape-5", (turned, shape), (output,)),
    )
    return heads, nodes, {shape: np.array([0, 0, -1], np.int64)}


def whole(
    graph: Graph, seen: Observation, pasts: Mapping[str, Part], presents: Mapping[str, Part], node: Node
) -> Layer | str | None:
    """The layer that the node is, or why it is none; None for attention that has no part in the cache."""
    kind = next(kind for kind in KINDS if is_kind(node, kind))
    given = {name: value for name, value in zip(_INPUTS[kind], node.inputs, strict=False) if value}
    if {"length", "beams", "width"} & given.keys() or any(node.outputs[3:]):
        return "its cache is a buffer with a length, or its scores are wanted"
    ranks = {name: len(shapes[0]) for name in given if (shapes := seen.shapes(given[name]))}
    if any(ranks.get(name, 3) not in (3, 4) for name in ("query", "key", "value")):
        return "its queries, keys and values are packed"
    found = _cached(graph, pasts, presents, node, given)
    if found is None or isinstance(found, str):
        return found
    return (_standard if kind == "Attention" else _microsoft)(seen, node, given, ranks, *found)


def _cached(
    graph: Graph, pasts: Mapping[str, Part], presents: Mapping[str, Part], node: Node, given: dict[str, str]
) -> tuple[Part, Part] | str | None:
    """Where the cache has the node's keys and values; `given` then has this step's. The node may bring the past, or
    get it with the new keys and values after it.
    """
    if "past_key" in given:
        found = [pasts.get(given.get(name, "")) for name in ("past_key", "past_value")]
        if None in found or [presents.get(name) for name in node.outputs[1:3]] != found:
            return "its past and present are not the cache's"
    else:
        kept = [part_of(graph, presents, given.get(name, "")) for name in ("key", "value")]
        if kept == [None, None]:
            return None
        found = [part[0] if part and part[1] == 1.0 else None for part in kept]
        if None in found or node.attrs.get("is_causal", 0) or node.attrs.get("unidirectional", 0):
            return "its keys and values are no cache, or its own mask doesn't count the past"
        for name, part in zip(("key", "value"), found, strict=True):
            place = next(value for value, one in presents.items() if one == part)
            new = fresh(graph, pasts, place, part)  # type: ignore[arg-type]
            if new is None:
                return f"{place!r} is not the past with the new keys or values after it"
            given[name] = new
    keys, values = found
    if keys is None or values is None or len(keys.order) != 4 or len(values.order) != 4:
        return "its past is not of rows, heads, positions and a size"
    return keys, values


def _microsoft(
    seen: Observation, node: Node, given: dict[str, str], ranks: dict[str, int], keys: Part, values: Part
) -> Layer | str:
    """MultiHeadAttention and DecoderMaskedMultiHeadAttention."""
    made, attrs = Parts(node.outputs[0]), node.attrs
    heads, size = int(attrs["num_heads"]), keys.size
    sizes = [heads * size, heads * size, heads * values.size]
    flat = [given["query"], given.get("key", ""), given.get("value", "")]
    if not flat[1]:
        flat = made.split(flat[0], sizes, ("q.flat", "k.flat", "v.flat"))
    apart = ranks.get("key") == 4
    if "bias" in given:
        biases = made.split(given["bias"], sizes, ("q.bias", "k.bias", "v.bias"), axis=0)
        pairs = zip("qkv", flat, biases, strict=True)
        flat = [x if apart and n != "q" else made.node("Add-7", (x, bias), f"{n}.biased") for n, x, bias in pairs]
    q = made.heads(flat[0], heads, "q")
    k, v = flat[1:] if apart else (made.heads(x, heads, n) for n, x in zip("kv", flat[1:], strict=True))
    masks = [Mask("", "causal")] if attrs.get("unidirectional", 0) else []
    masks += [Mask(given["added"], "add")] if "added" in given else []
    if "padding" in given:
        masks.append(Mask(given["padding"], "padding", float(attrs.get("mask_filter_value", -10000.0))))
    scale = float(attrs.get("scale", 0.0)) or 1 / math.sqrt(size)
    output, after, shape = joined(node.outputs[0])
    return Layer(
        node, q, k, v, keys, values, scale, output, masks=tuple(masks),
        before=tuple(made.nodes), after=after, constants=made.constants | shape,
    )  # fmt: skip


def _standard(
    seen: Observation, node: Node, given: dict[str, str], ranks: dict[str, int], keys: Part, values: Part
) -> Layer | str:
    """ONNX's own Attention."""
    made, attrs = Parts(node.outputs[0]), node.attrs
    left, right = (int(attrs.get(f"{side}_window_size", -1)) for side in ("left", "right"))
    if right > 0:
        return "its tokens see columns after their own"
    flat = ranks.get("query") == 3
    q, k, v = given["query"], given["key"], given["value"]
    if flat:
        q = made.heads(q, int(attrs["q_num_heads"]), "q")
        if "past_key" in given:
            k, v = (made.heads(x, int(attrs["kv_num_heads"]), n) for n, x in (("k", k), ("v", v)))
    masks = [Mask("", "causal")] if attrs.get("is_causal", 0) or right == 0 else []
    masks += [Mask("", "window", left + 1)] if left >= 0 else []
    if "added" in given:
        chosen = seen.dtype(given["added"]) in ("bool", None)
        masks.append(Mask(given["added"], "seen", -math.inf) if chosen else Mask(given["added"], "add"))
    scale = attrs.get("scale")
    scale = 1 / math.sqrt(keys.size) if scale is None else float(scale)
    output, after, shape = joined(node.outputs[0]) if flat else (node.outputs[0], (), {})
    return Layer(
        node, q, k, v, keys, values, scale, output, float(attrs.get("softcap", 0.0)), tuple(masks),
        before=tuple(made.nodes), after=after, constants=made.constants | shape,
    )  # fmt: skip
