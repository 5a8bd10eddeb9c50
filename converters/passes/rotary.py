"""Rotary: the rotation of halves that exporters write with slices, a negation and a concatenation becomes one node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from converters.match import Answer, Become, Graph, is_kind
from converters.observe import TRIALS, Observation, step
from converters.patterns import Op, Var, find
from mlx_transmuter import ops
from mlx_transmuter.module import Module
from mlx_transmuter.program import Node, Value

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
    seen = Observation.of(graph.program)
    if seen is None:
        return
    alike: dict[str, bool] = {}
    for node in graph.nodes:
        if not is_kind(node, "Add") or (found := find(graph, node, ROTATED)) is None:
            continue
        x, cos, sin = (seen.shapes(found[name]) for name in ("x", "cos", "sin"))
        if x is None or cos is None or sin is None or len(x[0]) != 4 or x[0][3] % 2:
            continue
        half = x[0][3] // 2
        halves = _range(graph, seen, found["first"]) == (0, half) and _range(graph, seen, found["second"])[0] == half
        if not halves or not all(len(shape[0]) == 4 and shape[0][1::2] == (1, 2 * half) for shape in (cos, sin)):
            continue
        for name in {found["cos"], found["sin"]} - alike.keys():
            alike[name] = _alike(graph, seen, name)
        if alike[found["cos"]] and alike[found["sin"]]:
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


def _alike(graph: Graph, seen: Observation, value: str) -> bool:
    """Whether the value's halves on the last axis are alike: it is computed for a step, however it is written."""
    program = graph.program
    part = replace(program, outputs=(Value(value, "float32", None),)).select([value])
    arrays = {name: tensor.array() for name, tensor in part.arrays.items()}
    try:
        found = Module(part, arrays)(**step(program, seen.signature, *TRIALS[0]))[value]
    except ops.OperatorError:
        return False
    first, second = mx.split(found, 2, axis=-1)
    return bool(mx.all(first == second))
