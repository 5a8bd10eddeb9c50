"""Rotary: the rotation of halves that exporters write with slices, a negation and a concatenation becomes one node."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Graph, is_kind
from converters.observe import Observation
from converters.patterns import Op, Var, find
from mlx_transmuter.program import Node

_X = Var("x")
ROTATED = Op(
    "Add",
    Op("Mul", _X, Var("cos")),
    Op(
        "Mul",
        Op("Concat", Op("Neg", Op("Slice", _X, name="second")), Op("Slice", _X, name="first"), name="turned"),
        Var("sin"),
    ),
)


def rotary(graph: Graph) -> Iterator[Answer]:
    """x · cos + [−x₂, x₁] · sin → mlx.rotary, where cos and sin have like halves. Su 2021."""
    seen = graph.observation
    if seen is None:
        return
    for node in graph.nodes:
        if not is_kind(node, "Add") or (found := find(graph, node, ROTATED)) is None:
            continue
        x, cos, sin = (seen.shapes(found[name]) for name in ("x", "cos", "sin"))
        if x is None or cos is None or sin is None or len(x[0]) != 4 or x[0][3] % 2:
            continue
        half = x[0][3] // 2
        halves = _range(graph, seen, found["first"]) == (0, half) and _range(graph, seen, found["second"])[0] == half
        alike = all(_doubled(graph, found[name]) for name in ("cos", "sin"))
        if halves and alike and all(shape[0][3] == 2 * half and shape[0][1] == 1 for shape in (cos, sin)):
            yield Become(
                node, (Node("mlx.rotary", (found["x"], found["cos"], found["sin"]), node.outputs, name=node.name),)
            )


def _range(graph: Graph, seen: Observation, value: str) -> tuple[int | None, int | None]:
    """The begin and the end of a Slice of the last axis."""
    node = graph.producer(value)
    if node is None or len(node.inputs) < 4:
        return None, None
    starts, ends, axes = (graph.constant(name) for name in node.inputs[1:4])
    rank = len((seen.shapes(value) or [()])[0])
    if starts is None or ends is None or axes is None or starts.size != 1 or axes.ravel()[0] % max(rank, 1) != rank - 1:
        return None, None
    return int(starts.ravel()[0]), int(ends.ravel()[0])


def _doubled(graph: Graph, value: str, depth: int = 10) -> bool:
    """Whether the value's halves on the last axis are alike: it comes, by what works on each element, from a Concat(a,
    a).
    """
    node = graph.producer(value)
    if node is None or not depth:
        return False
    if is_kind(node, "Concat"):
        return len(node.inputs) == 2 and node.inputs[0] == node.inputs[1]
    if any(is_kind(node, kind) for kind in ("Cos", "Sin", "Cast", "Unsqueeze", "Mul", "Reshape", "Transpose")):
        return any(_doubled(graph, name, depth - 1) for name in node.inputs)
    return False
