"""Experts: a mixture whose experts each gather their own tokens runs every expert over all tokens, and keeps its own.

An exporter writes `which, token = where(chosen by this expert)`, gathers those tokens, and scatters the expert's output
back. How many tokens an expert has is known only when the step runs, so no compiled step can have that form. Here
`token` becomes all of them, `which` the place of the choice, and the scatter a Where on whether there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.ops import ELEMENT_TYPE_CODES
from mlx_transmuter.program import Node

_INDEX_PASSING_OPS = ("Unsqueeze", "Expand", "Cast", "Reshape", "Identity")


def make_experts_dense(graph: GraphView) -> Iterator[MatchOutcome]:
    """Gather and scatter at the indices of NonZero(chosen [choices, tokens] or [tokens, choices]) → Where(chosen)."""
    for node in graph.nodes:
        if not is_op_type(node, "NonZero"):
            continue
        indices = _axis_indices(graph, node)
        scatters = [_find_scatters(graph, index.outputs[0]) for index in indices]
        if len(indices) != 2 or sorted(map(bool, scatters)) != [False, True]:
            yield SkippedMatch(node, "its indices are no choice and token of which one alone is scattered to")
            continue
        axis = 0 if scatters[0] else 1
        token, which = indices[axis], indices[1 - axis]
        yield from _replace_indices(graph, node.inputs[0], node.outputs[0], axis, token, which, scatters[axis])


def _axis_indices(graph: GraphView, node: Node) -> list[Node]:
    """The nodes that give the indices of each axis apart, [found]: Squeeze(Split(Transpose(NonZero))), or of Slices."""
    turned = graph.only_consumer(node.outputs[0])
    parts = graph.consumers(turned.outputs[0]) if turned and is_op_type(turned, "Transpose") else []
    if len(parts) == 1 and is_op_type(parts[0], "Split") and parts[0].attrs.get("axis", 0) in (1, -1):
        columns = list(parts[0].outputs)
    else:
        columns = [part.outputs[0] for part in sorted(parts, key=lambda part: _sliced_column(graph, part))]
        if [_sliced_column(graph, part) for part in parts] != list(range(len(parts))):
            return []
    found = [graph.only_consumer(name) for name in columns]
    return [one for one in found if one is not None and is_op_type(one, "Squeeze")]


def _sliced_column(graph: GraphView, node: Node) -> int:
    """Which column alone a Slice gives, -1 for another node."""
    given = [graph.constant(name) for name in node.inputs[1:]] if is_op_type(node, "Slice") else []
    parts = [int(one.item()) for one in given if one is not None and one.size == 1]
    plain = len(parts) == len(given) >= 3 and parts[1] == parts[0] + 1 and parts[2:] in ([1], [-1], [1, 1], [-1, 1])
    return parts[0] if plain else -1


def _find_scatters(graph: GraphView, index: str) -> list[Node]:
    """The nodes that scatter to the index on axis 0."""
    found = []
    for node in graph.consumers(index):
        scatter = is_op_type(node, "ScatterElements") or is_op_type(node, "ScatterND")
        plain = node.attrs.get("axis", 0) == 0 and node.attrs.get("reduction", "none") in ("none", "add")
        if scatter and plain and node.inputs[1] == index:
            found.append(node)
        elif is_op_type(node, *_INDEX_PASSING_OPS) and node.inputs[0] == index:
            found += _find_scatters(graph, node.outputs[0])
    return found


def _find_gathers(graph: GraphView, index: str) -> list[Node]:
    """The nodes that gather tokens at the index, [found]: Gather on any axis, GatherND at [found, 1]."""
    found = []
    for node in graph.consumers(index):
        if is_op_type(node, "Gather") and node.inputs[1] == index:
            found.append(node)
        elif is_op_type(node, "Unsqueeze") and (axes := graph.constant(node.inputs[1])) is not None and axes.size == 1:
            last = int(axes.item()) in (1, -1)
            others = [one for one in graph.consumers(node.outputs[0]) if is_op_type(one, "GatherND")]
            found += [
                one
                for one in others
                if last and one.inputs[1] == node.outputs[0] and not one.attrs.get("batch_dims", 0)
            ]
    return found


def _replace_indices(
    graph: GraphView,
    choice_mask: str,
    name_prefix: str,
    token_axis: int,
    token_index: Node,
    choice_index: Node,
    scatters: list[Node],
) -> Iterator[MatchOutcome]:
    """What becomes of the indices and of what reads them; `axis` of `chosen` has the tokens."""
    parts = ("sizes", "count", "axis", "zero", "one", "number", "best", "has", "had", "last")
    names = {part: f"{name_prefix}.{part}" for part in parts}
    constants = {
        names["axis"]: np.array(token_axis, np.int64),
        names["zero"]: np.array(0, np.int64),
        names["one"]: np.array(1, np.int64),
        names["last"]: np.array([1], np.int64),
    }
    everyone = (
        Node("Shape-1", (choice_mask,), (names["sizes"],)),
        Node("Gather-1", (names["sizes"], names["axis"]), (names["count"],), {"axis": 0}),
        Node("Range-11", (names["zero"], names["count"], names["one"]), token_index.outputs),
    )
    yield Replacement(token_index, everyone, constants=constants)
    first = (
        Node("Cast-9", (choice_mask,), (names["number"],), {"to": ELEMENT_TYPE_CODES["int32"]}),
        Node("ArgMax-11", (names["number"],), choice_index.outputs, {"axis": 1 - token_axis, "keepdims": 0}),
        Node("ReduceMax-11", (names["number"],), (names["best"],), {"axes": [1 - token_axis], "keepdims": 0}),
        Node("Cast-9", (names["best"],), (names["had"],), {"to": ELEMENT_TYPE_CODES["bool"]}),
        Node("Unsqueeze-13", (names["had"], names["last"]), (names["has"],)),
    )
    yield Replacement(choice_index, first)
    for node in _find_gathers(graph, token_index.outputs[0]):
        yield Replacement(node, (), aliases={node.outputs[0]: node.inputs[0]})
    for node in scatters:
        data, _, update = node.inputs
        if node.attrs.get("reduction", "none") == "none":
            yield Replacement(node, (Node("Where-9", (names["has"], update, data), node.outputs, name=node.name),))
            continue
        added = Node("Add-7", (data, update), (f"{node.outputs[0]}.added",))
        yield Replacement(
            node, (added, Node("Where-9", (names["has"], added.outputs[0], data), node.outputs, name=node.name))
        )
