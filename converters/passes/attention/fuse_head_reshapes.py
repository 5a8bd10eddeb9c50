"""Heads: the reshape and transpose that split a token's vector into heads, or merge them again, become one node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node

_HEADS_TOKENS_SWAP = [0, 2, 1, 3]


def fuse_head_reshapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces Transpose(Reshape(x, [0, 0, heads, dim])) by mlx.split_heads, and Reshape(Transpose(x), [0, 0,
    heads · dim]) by mlx.merge_heads, which mlx.attention does itself. A step of one token then moves nothing.
    """
    for node in graph.nodes:
        if _swaps_heads_and_tokens(node):
            reshape = graph.producer(node.inputs[0], "Reshape")
            shape = _token_keeping_shape(graph, reshape)
            if reshape is not None and len(shape) == 4 and shape[2] > 0:
                split = Node("mlx.split_heads", reshape.inputs[:1], node.outputs, {"heads": shape[2]}, node.name)
                yield Replacement(node, (split,))
        elif is_op_type(node, "Reshape"):
            transpose, shape = graph.producer(node.inputs[0]), _token_keeping_shape(graph, node)
            if transpose is not None and _swaps_heads_and_tokens(transpose) and len(shape) == 3:
                yield from _merge_heads(graph, transpose, node)


def _merge_heads(graph: GraphView, transpose: Node, reshape: Node) -> Iterator[Replacement]:
    """Merges heads in the attention whose output this is, where nothing else reads that; else in mlx.merge_heads."""
    attention = graph.producer(transpose.inputs[0], "mlx.attention")
    if (
        attention is None
        or graph.only_consumer(attention.outputs[0]) is not transpose
        or graph.only_consumer(transpose.outputs[0]) is not reshape
    ):
        merge = Node("mlx.merge_heads", transpose.inputs, reshape.outputs, name=reshape.name)
        yield Replacement(reshape, (merge,))
        return
    outputs = (reshape.outputs[0], *attention.outputs[1:])
    yield Replacement(attention, (replace(attention, outputs=outputs, attrs={**attention.attrs, "merge": 1}),))
    yield Replacement(reshape, ())


def _swaps_heads_and_tokens(node: Node) -> bool:
    return is_op_type(node, "Transpose") and list(node.attrs.get("perm", ())) == _HEADS_TOKENS_SWAP


def _token_keeping_shape(graph: GraphView, reshape: Node | None) -> list[int]:
    """Returns the constant shape of a Reshape that keeps rows and tokens, [0, 0, …]; [] for another one."""
    if reshape is None or reshape.attrs.get("allowzero"):
        return []
    constant = graph.constant(reshape.inputs[1])
    shape = [] if constant is None else [int(size) for size in constant.ravel()]
    return shape if shape[:2] == [0, 0] else []
