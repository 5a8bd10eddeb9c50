"""Rotary: the rotation of halves, or of neighbours, that exporters write with slices, a negation and a concatenation
becomes one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from converters.match import Answer, Become, Graph, is_kind
from converters.observe import TRIALS, Observation, step
from converters.patterns import Bindings, Op, Var, find
from mlx_transmuter import ops
from mlx_transmuter.module import Module
from mlx_transmuter.program import Node, Value

_X = Var("x")
_SECOND, _FIRST = Op("Neg", Op("Slice", _X, name="second")), Op("Slice", _X, name="first")


def _sum(turned: Op) -> Op:
    return Op("Add", Op("Mul", _X, Var("cos")), Op("Mul", turned, Var("sin")))


HALVES = _sum(Op("Concat", _SECOND, _FIRST, name="turned"))
PAIRS = _sum(Op("Reshape", Op("Concat", Op("Unsqueeze", _SECOND), Op("Unsqueeze", _FIRST), name="turned")))


def rotary(graph: Graph) -> Iterator[Answer]:
    """x · cos + [−x₂, x₁] · sin → mlx.rotary, where x₁ and x₂ are halves or neighbours, and cos and sin are alike for
    both. Su 2021.
    """
    seen = graph.observation
    if seen is None:
        return
    alike: dict[tuple[str, bool], bool] = {}
    for node in graph.nodes:
        if not is_kind(node, "Add"):
            continue
        halves = find(graph, node, HALVES)
        found = halves or find(graph, node, PAIRS)
        if found is None or not _fits(graph, seen, found, bool(halves)):
            continue
        for name in (found["cos"], found["sin"]):
            if (name, bool(halves)) not in alike:
                alike[name, bool(halves)] = _alike(graph, seen, name, bool(halves))
        if alike[found["cos"], bool(halves)] and alike[found["sin"], bool(halves)]:
            attrs = {} if halves else {"interleaved": 1}
            inputs = (found["x"], found["cos"], found["sin"])
            yield Become(node, (Node("mlx.rotary", inputs, node.outputs, attrs, node.name),))


def _fits(graph: Graph, seen: Observation, found: Bindings, halves: bool) -> bool:
    """Whether the slices are x₁ and x₂, in one tensor of x's size, and cos and sin broadcast with it."""
    shapes = [seen.shapes(found[name]) for name in ("x", "cos", "sin", "turned")]
    if any(one is None for one in shapes):
        return False
    x, cos, sin, turned = (one[0] for one in shapes if one is not None)
    dim = x[-1] if x else 0
    if len(x) != 4 or dim % 2 or any(len(one) != 4 or one[3] != dim for one in (cos, sin)):
        return False
    if any(size not in (1, own) for one in (cos, sin) for size, own in zip(one, x, strict=True)):
        return False
    wanted = ((0, dim // 2, 1), (dim // 2, dim, 1)) if halves else ((0, dim, 2), (1, dim, 2))
    slices = tuple(_range(graph, seen, found[name], dim) for name in ("first", "second"))
    return slices == wanted and turned == (x if halves else (*x[:3], dim // 2, 2))


def _range(graph: Graph, seen: Observation, value: str, size: int) -> tuple[int, int, int] | None:
    """The begin, end and step of a Slice of the last axis, which has that size."""
    node = graph.producer(value)
    constants = [graph.constant(name) for name in node.inputs[1:]] if node else []
    if len(constants) not in (3, 4) or any(one is None or one.size != 1 for one in constants):
        return None
    begin, end, axis, step = (*(int(one.ravel()[0]) for one in constants if one is not None), 1)[:4]
    rank = len((seen.shapes(value) or [()])[0])
    return slice(begin, end, step).indices(size) if step > 0 and rank and axis % rank == rank - 1 else None


def _alike(graph: Graph, seen: Observation, value: str, halves: bool) -> bool:
    """Whether the value's halves, or neighbours, on the last axis are alike: it is computed for a step, however it is
    written.
    """
    program = graph.program
    part = replace(program, outputs=(Value(value, "float32", None),)).select([value])
    arrays = {name: tensor.array() for name, tensor in part.arrays.items()}
    try:
        found = Module(part, arrays)(**step(program, seen.signature, *TRIALS[0]))[value]
    except ops.OperatorError:
        return False
    first, second = mx.split(found, 2, axis=-1) if halves else (found[..., ::2], found[..., 1::2])
    return bool(mx.all(first == second))
