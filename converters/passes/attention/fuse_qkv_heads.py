"""Heads of a merged product: queries, keys and values are split into heads in one node, queries and keys rotated in one
node, and keys and values stored in one pool as one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.node_builder import build_split
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.slices import split_sizes
from mlx_transmuter.ops import OPERATORS, bind_inputs
from mlx_transmuter.program import Node


def fuse_qkv_heads(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces mlx.split_heads of each output of Split(x) by Split(mlx.split_heads(x)).

    Where mlx.rotary rotates the first two outputs by the same angles, it rotates them in one node, before that split.
    Where mlx.attention stores the last two in one pool, they stay one value.
    """
    for node in graph.nodes:
        parts = _find_head_splits(graph, node)
        if parts:
            yield from _fuse_heads(graph, node, parts)


def _fuse_heads(graph: GraphView, split: Node, parts: Sequence[Node]) -> Iterator[Replacement]:
    """split: the Split of the merged product; parts: the mlx.split_heads of each of its outputs."""
    heads, names = [int(part.attrs["heads"]) for part in parts], [part.outputs[0] for part in parts]
    merged = f"{split.outputs[0]}.heads"
    split_heads = Node("mlx.split_heads", split.inputs[:1], (merged,), {"heads": sum(heads)}, parts[0].name)
    rotations = _find_equal_rotations(graph, names[:2])
    rotated = [graph.consumers(name)[0].outputs[0] for name in names[:2]] if rotations else names[:2]
    attention = _find_shared_pool_attention(graph, [*rotated, *names[2:]], heads)
    sizes, outputs = heads, [*rotated, *names[2:]]
    if attention is not None:
        sizes, outputs = [heads[0], sum(heads[1:])], [rotated[0], f"{merged}.keys_and_values"]
        yield Replacement(attention, (_with_inputs(attention, q=rotated[0], k=outputs[1], v=""),))
    if rotations is None:
        pieces, constants = build_split(merged, sizes, outputs, axis=1)
        yield Replacement(split, (split_heads, pieces), constants=constants)
    else:
        first, last = rotations
        rotary_input, rotary_output = merged, f"{merged}.rotated"
        attrs = last.attrs
        if attention is not None:
            attrs = {**attrs, "heads": sum(heads[:2])}  # the values of the pool go through the rotation unrotated
            yield Replacement(split, (split_heads,))
        else:
            rotary_input, sizes, outputs = f"{merged}.queries_and_keys", heads[:2], rotated
            pieces, constants = build_split(merged, [sum(heads[:2]), *heads[2:]], [rotary_input, *names[2:]], axis=1)
            yield Replacement(split, (split_heads, pieces), constants=constants)
        rotary = Node("mlx.rotary", (rotary_input, *last.inputs[1:]), (rotary_output,), attrs, last.name)
        pieces, constants = build_split(rotary_output, sizes, outputs, axis=1)
        yield Replacement(last, (rotary, pieces), constants=constants)
        yield Replacement(first, ())
    yield from (Replacement(part, ()) for part in parts)


def _with_inputs(node: Node, **values: str) -> Node:
    """Returns the node with other values for the inputs of those names."""
    inputs = list(node.inputs)
    for name, value in values.items():
        inputs[OPERATORS[node.op].input_number(name)] = value
    return replace(node, inputs=tuple(inputs))


def _find_shared_pool_attention(graph: GraphView, qkv: Sequence[str], heads: Sequence[int]) -> Node | None:
    """Returns the attention of these queries, keys and values, if it has one pool for the last two; else None.

    Nothing else may read these two.
    """
    node = graph.only_consumer(qkv[-1]) if len(qkv) == 3 and heads[1] == heads[2] else None
    if node is None or node.op != "mlx.attention" or graph.only_consumer(qkv[1]) is not node:
        return None
    inputs = bind_inputs(node)
    reads_qkv = [inputs.get(name) for name in "qkv"] == list(qkv)
    return node if reads_qkv and "value_pool" not in inputs else None


def _find_head_splits(graph: GraphView, node: Node) -> list[Node]:
    """Returns the mlx.split_heads of each output of a Split of the last axis; [] where their heads differ in size."""
    sizes = split_sizes(graph, node)
    if sizes is None or len(node.outputs) < 2 or node.attrs.get("axis", 0) not in (-1, 2):
        return []
    consumers = [graph.only_consumer(output) for output in node.outputs]
    parts = [consumer for consumer in consumers if consumer is not None and consumer.op == "mlx.split_heads"]
    if len(parts) != len(node.outputs):
        return []
    head_dims = {size / part.attrs["heads"] for size, part in zip(sizes, parts, strict=True)}
    return parts if len(head_dims) == 1 else []


def _find_equal_rotations(graph: GraphView, values: Sequence[str]) -> tuple[Node, Node] | None:
    """Returns the nodes that rotate both values by the same angles, in the order of the graph, or None."""
    rotations = [node for value in values if (node := _rotation_of(graph, value)) is not None]
    if len(rotations) != 2:
        return None
    first, last = graph.in_order(rotations)
    if (first.inputs[1:], first.attrs) != (last.inputs[1:], last.attrs):
        return None
    tables = [graph.shape_probe and graph.shape_probe.shapes(name) for name in last.inputs[1:]]
    if any(shapes and shapes[0][1] != 1 for shapes in tables):  # a table for each head, so not for queries and keys
        return None
    readers = graph.consumers(first.outputs[0])
    return (first, last) if all(graph.position(reader) > graph.position(last) for reader in readers) else None


def _rotation_of(graph: GraphView, value: str) -> Node | None:
    """Returns the mlx.rotary that alone reads the value, as what it rotates."""
    node = graph.only_consumer(value)
    return node if node is not None and node.op == "mlx.rotary" and node.inputs[0] == value else None
