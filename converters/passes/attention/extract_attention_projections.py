"""Unpacked: onnxruntime's Attention, which brings its projections, becomes a product and attention of its parts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.program import Node

_OPERATOR = "com.microsoft.Attention"
_CUDA_ATTRIBUTES = ("do_rotary", "past_present_share_buffer")


def extract_attention_projections(graph: GraphView) -> Iterator[MatchOutcome]:
    """Attention(x, w, b, mask, past) → MultiHeadAttention of x · w + b in three, its past and present in two."""
    for node in graph.nodes:
        if not is_op_type(node, _OPERATOR):
            continue
        inputs: dict[str, str] = dict(
            zip(("x", "weights", "bias", "mask", "past", "added", "length"), node.inputs, strict=False)
        )
        weights = graph.weight(inputs["weights"])
        if not inputs.get("past") or inputs.get("length") or any(node.attrs.get(name, 0) for name in _CUDA_ATTRIBUTES):
            yield SkippedMatch(node, "it has no past, or one that is a buffer with a length")
            continue
        sizes = node.attrs.get("qkv_hidden_sizes")
        if weights is None or (sizes and len(set(sizes)) > 1):
            yield SkippedMatch(node, "its projections are no weight of three like parts")
            continue
        yield _extract_projections(node, inputs, weights.shape[1] // 3)


def _extract_projections(node: Node, inputs: dict[str, str], projection_size: int) -> Replacement:
    output, present = node.outputs[0], node.outputs[1] if len(node.outputs) > 1 else ""
    names = {part: f"{output}.{part}" for part in ("sizes", "keys", "values", "first")}
    constants = {
        names["sizes"]: np.array([projection_size] * 3, np.int64),
        names["keys"]: np.array(0, np.int64),
        names["values"]: np.array(1, np.int64),
        names["first"]: np.array([0], np.int64),
    }
    flat = [f"{output}.product"]
    nodes = [Node("MatMul-1", (inputs["x"], inputs["weights"]), (flat[0],), name=node.name)]
    if inputs.get("bias"):
        flat.append(f"{output}.biased")
        nodes.append(Node("Add-7", (flat[0], inputs["bias"]), (flat[1],)))
    q, k, v = (f"{output}.{part}.part" for part in "qkv")
    past = [f"{output}.past.{part}" for part in "kv"]
    news = [f"{output}.present.{part}" for part in "kv"]
    stacked = [f"{name}.1" for name in news]
    attrs = {
        key: node.attrs[key]
        for key in ("num_heads", "unidirectional", "mask_filter_value", "scale")
        if key in node.attrs
    }
    nodes += [
        Node("Split-18", (flat[-1], names["sizes"]), (q, k, v), {"axis": -1}),
        Node("Gather-1", (inputs["past"], names["keys"]), (past[0],), {"axis": 0}),
        Node("Gather-1", (inputs["past"], names["values"]), (past[1],), {"axis": 0}),
        Node(
            "com.microsoft.MultiHeadAttention-1",
            (q, k, v, "", inputs.get("mask", ""), inputs.get("added", ""), *past),
            (output, *news),
            attrs,
            node.name,
        ),
    ]
    if present:
        nodes += [Node("Unsqueeze-13", (name, names["first"]), (one,)) for name, one in zip(news, stacked, strict=True)]
        nodes.append(Node("Concat-4", tuple(stacked), (present,), {"axis": 0}))
    return Replacement(node, tuple(nodes), constants=constants)
