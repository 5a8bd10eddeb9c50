"""Projections: com.microsoft's Attention, which holds its own, becomes a product and a MultiHeadAttention."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node

_OPERATOR = "com.microsoft.Attention"
_CUDA_ATTRIBUTES = ("do_rotary", "past_present_share_buffer")
_KEPT_ATTRIBUTES = ("num_heads", "unidirectional", "mask_filter_value", "scale")


def extract_attention_projections(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces Attention(x, w, b, mask, past) by MultiHeadAttention of the three parts of x · w + b.

    Its past and its present, which have keys and values in one tensor, become two each.
    """
    for node in graph.nodes:
        if not is_op_type(node, _OPERATOR):
            continue
        inputs = bind_inputs(node)
        weights, sizes = graph.weight(inputs["weights"]), node.attrs.get("qkv_hidden_sizes")
        if (
            "past" not in inputs
            or "past_sequence_length" in inputs
            or any(node.attrs.get(name, 0) for name in _CUDA_ATTRIBUTES)
        ):
            yield SkippedMatch(node, "it has no past, or one that is a buffer with a length")
        elif weights is None or (sizes and len(set(sizes)) > 1):
            yield SkippedMatch(node, "its projections are not one weight of three equal parts")
        else:
            yield _extract_projections(node, inputs, weights.shape[1] // 3)


def _extract_projections(node: Node, inputs: dict[str, str], projection_size: int) -> Replacement:
    output, present = node.outputs[0], node.outputs[1] if len(node.outputs) > 1 else ""
    builder = NodeBuilder(output)
    product = f"{output}.product"
    builder.nodes.append(Node("MatMul-1", (inputs["x"], inputs["weights"]), (product,), name=node.name))
    if "bias" in inputs:
        product = builder.add_node("Add-7", (product, inputs["bias"]), "biased")
    q, k, v = builder.add_split(product, [projection_size] * 3, ("q.part", "k.part", "v.part"))
    pasts = [
        builder.add_node("Gather-1", (inputs["past"], builder.add_constant(name, half)), f"past.{part}", axis=0)
        for half, (name, part) in enumerate((("keys", "k"), ("values", "v")))
    ]
    presents = [f"{output}.present.{part}" for part in "kv"]
    mask, bias = inputs.get("mask_index", ""), inputs.get("attention_bias", "")
    attrs = {key: node.attrs[key] for key in _KEPT_ATTRIBUTES if key in node.attrs}
    attention_inputs = (q, k, v, "", mask, bias, *pasts)
    builder.nodes.append(
        Node("com.microsoft.MultiHeadAttention-1", attention_inputs, (output, *presents), attrs, node.name)
    )
    if present:
        axis = builder.add_constant("first", [0])
        stacked = tuple(
            builder.add_node("Unsqueeze-13", (name, axis), f"present.{part}.1")
            for name, part in zip(presents, "kv", strict=True)
        )
        builder.nodes.append(Node("Concat-4", stacked, (present,), {"axis": 0}))
    return Replacement(node, tuple(builder.nodes), constants=builder.constants)
