"""Together: what a joined product gives is parted into heads at once, its queries and keys are rotated at once, and its
keys and values are kept at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node


def fuse_qkv_heads(graph: GraphView) -> Iterator[MatchOutcome]:
    """Split(x) into parts that mlx.split_heads parts → mlx.split_heads(x), then Split; where mlx.rotary turns the first
    two parts alike, it turns them before they are split. Where mlx.attention keeps the last two in one pool, they stay
    one."""
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        parted = _find_head_splits(graph, node)
        if not parted:
            continue
        heads = [int(one.attrs["heads"]) for one in parted]
        ends = [one.outputs[0] for one in parted]
        whole = f"{node.outputs[0]}.heads"
        made = Node("mlx.split_heads", node.inputs[:1], (whole,), {"heads": sum(heads)}, parted[0].name)
        rotated = _find_equal_rotations(graph, ends[:2], order)
        turned = [graph.consumers(end)[0].outputs[0] for end in ends[:2]] if rotated else ends[:2]
        attention = _find_shared_pool_attention(graph, [*turned, *ends[2:]], heads)
        both = f"{whole}.both"
        if attention is not None:
            yield Replacement(attention, (replace(attention, inputs=(turned[0], both, "", *attention.inputs[3:])),))
        if rotated is not None:
            early, late = rotated
            alike, after = f"{whole}.alike", f"{whole}.turned"
            if attention is not None:  # the values are turned too, by an angle of 0
                yield Replacement(node, (made,))
                attrs = {**late.attrs, "heads": sum(heads[:2])}
                rotary = Node("mlx.rotary", (whole, *late.inputs[1:]), (after,), attrs, late.name)
                second, constants = _build_split(after, [heads[0], sum(heads[1:])], [turned[0], both])
            else:
                first, constants = _build_split(whole, [sum(heads[:2]), *heads[2:]], [alike, *ends[2:]])
                yield Replacement(node, (made, first), constants=constants)
                rotary = Node("mlx.rotary", (alike, *late.inputs[1:]), (after,), late.attrs, late.name)
                second, constants = _build_split(after, heads[:2], turned)
            yield Replacement(late, (rotary, second), constants=constants)
            yield Replacement(early, ())
        else:
            sizes, outputs = ([heads[0], sum(heads[1:])], [ends[0], both]) if attention is not None else (heads, ends)
            split, constants = _build_split(whole, sizes, outputs)
            yield Replacement(node, (made, split), constants=constants)
        yield from (Replacement(one, ()) for one in parted)


def _build_split(source: str, sizes: Sequence[int], outputs: Sequence[str]) -> tuple[Node, dict[str, np.ndarray]]:
    """A Split of the heads of source, and the constant that says how many each output has."""
    name = f"{source}.sizes"
    return Node("Split-13", (source, name), tuple(outputs), {"axis": 1}), {name: np.array(sizes, np.int64)}


def _find_shared_pool_attention(graph: GraphView, qkv: Sequence[str], heads: Sequence[int]) -> Node | None:
    """The attention of these queries, keys and values, if it is all that reads the last two, and has one pool for them;
    else None."""
    node = graph.only_consumer(qkv[-1]) if len(qkv) == 3 and heads[1] == heads[2] else None
    if node is None or node.op != "mlx.attention" or node.inputs[4] or list(node.inputs[:3]) != list(qkv):
        return None
    return node if graph.only_consumer(qkv[1]) is node else None


def _find_head_splits(graph: GraphView, node: Node) -> list[Node]:
    """The nodes that part each output of a Split of the last axis into heads of one size; [] for anything else."""
    sizes = graph.constant(node.inputs[1]) if node.op.startswith("Split-") and len(node.inputs) > 1 else None
    if sizes is None or node.attrs.get("axis", 0) not in (-1, 2) or len(node.outputs) < 2:
        return []
    parted = [graph.only_consumer(output) for output in node.outputs]
    found = [one for one in parted if one is not None and one.op == "mlx.split_heads"]
    if len(found) != len(node.outputs):
        return []
    dims = {size / one.attrs["heads"] for size, one in zip(sizes.tolist(), found, strict=True)}
    return found if len(dims) == 1 else []


def _find_equal_rotations(graph: GraphView, values: Sequence[str], order: dict[int, int]) -> tuple[Node, Node] | None:
    """The nodes that rotate both values by the same angles, the earlier one first, or None."""
    found = [graph.only_consumer(end) for end in values]
    if any(
        one is None or one.op != "mlx.rotary" or one.inputs[0] != end for one, end in zip(found, values, strict=True)
    ):
        return None
    early, late = sorted((one for one in found if one is not None), key=lambda one: order[id(one)])
    if (early.inputs[1:], early.attrs) != (late.inputs[1:], late.attrs):
        return None
    tables = [graph.shape_probe and graph.shape_probe.shapes(name) for name in late.inputs[1:]]
    if any(shapes and shapes[0][1] != 1 for shapes in tables):  # a table for each head, and so for each value its own
        return None
    readers = graph.consumers(early.outputs[0])
    return (early, late) if all(order.get(id(one), -1) > order[id(late)] for one in readers) else None
