"""Heads: what parts a token's vector into heads and joins them again becomes one node each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node

_HEADS_TOKENS_SWAP = [0, 2, 1, 3]


def fuse_head_reshapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Transpose(Reshape(x, [0, 0, heads, dim])) → mlx.split_heads; Reshape(Transpose(x), [0, 0, heads · dim]) →
    mlx.merge_heads, which attention over pools does itself. A step of one token then moves nothing."""
    for node in graph.nodes:
        if is_op_type(node, "Transpose") and _swaps_heads_and_tokens(node):
            split = graph.producer(node.inputs[0], "Reshape")
            shape = _token_keeping_shape(graph, split)
            if split is not None and len(shape) == 4 and shape[2] > 0:
                made = Node("mlx.split_heads", split.inputs[:1], node.outputs, {"heads": shape[2]}, node.name)
                yield Replacement(node, (made,))
        elif is_op_type(node, "Reshape"):
            turned = graph.producer(node.inputs[0], "Transpose")
            if turned is None or not _swaps_heads_and_tokens(turned) or len(_token_keeping_shape(graph, node)) != 3:
                continue
            source = graph.producer(turned.inputs[0], "mlx.attention")
            alone = source is not None and graph.only_consumer(source.outputs[0]) is turned
            if source is not None and alone and graph.only_consumer(turned.outputs[0]) is node:
                outputs = (node.outputs[0], *source.outputs[1:])
                yield Replacement(source, (replace(source, outputs=outputs, attrs={**source.attrs, "merge": 1}),))
                yield Replacement(node, ())
            else:
                yield Replacement(node, (Node("mlx.merge_heads", turned.inputs, node.outputs, name=node.name),))


def _swaps_heads_and_tokens(node: Node) -> bool:
    return list(node.attrs.get("perm", ())) == _HEADS_TOKENS_SWAP


def _token_keeping_shape(graph: GraphView, node: Node | None) -> list[int]:
    """The constant shape of a Reshape that keeps rows and tokens, [] for another one."""
    shape = None if node is None or node.attrs.get("allowzero") else graph.constant(node.inputs[1])
    found = [] if shape is None else [int(size) for size in shape.ravel()]
    return found if found[:2] == [0, 0] else []
