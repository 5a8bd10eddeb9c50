"""Rotary: the rotation of halves, or of neighbours, that exporters write with slices, a negation and a concatenation
becomes one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.patterns import Bindings, Op, Var, match_pattern
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe, make_step_inputs
from mlx_transmuter.program import Node, Value
from mlx_transmuter.runtime.module import ProgramModule

_X = Var("x")
_NEGATED_SECOND_PART, _FIRST_PART = Op("Neg", Op("Slice", _X, name="second")), Op("Slice", _X, name="first")


def _rotation_pattern(rotated_part: Op) -> Op:
    return Op("Add", Op("Mul", _X, Var("cos")), Op("Mul", rotated_part, Var("sin")))


ROTATE_HALVES_PATTERN = _rotation_pattern(Op("Concat", _NEGATED_SECOND_PART, _FIRST_PART, name="turned"))
ROTATE_PAIRS_PATTERN = _rotation_pattern(
    Op("Reshape", Op("Concat", Op("Unsqueeze", _NEGATED_SECOND_PART), Op("Unsqueeze", _FIRST_PART), name="turned"))
)


def fuse_rotary_embedding(graph: GraphView) -> Iterator[MatchOutcome]:
    """x · cos + [−x₂, x₁] · sin → mlx.rotary, where x₁ and x₂ are halves or neighbours, and cos and sin are alike for
    both. Su 2021.
    """
    seen = graph.shape_probe
    if seen is None:
        return
    alike: dict[tuple[str, bool], bool] = {}
    for node in graph.nodes:
        if not is_op_type(node, "Add"):
            continue
        halves = match_pattern(graph, node, ROTATE_HALVES_PATTERN)
        found = halves or match_pattern(graph, node, ROTATE_PAIRS_PATTERN)
        if found is None or not _is_rotation(graph, seen, found, bool(halves)):
            continue
        for name in (found["cos"], found["sin"]):
            if (name, bool(halves)) not in alike:
                alike[name, bool(halves)] = _has_equal_halves(graph, seen, name, bool(halves))
        if alike[found["cos"], bool(halves)] and alike[found["sin"], bool(halves)]:
            attrs = {} if halves else {"interleaved": 1}
            inputs = (found["x"], found["cos"], found["sin"])
            yield Replacement(node, (Node("mlx.rotary", inputs, node.outputs, attrs, node.name),))


def _is_rotation(graph: GraphView, probe: ShapeProbe, bindings: Bindings, halves: bool) -> bool:
    """Whether the slices are x₁ and x₂, in one tensor of x's size, and cos and sin broadcast with it."""
    shapes = [probe.shapes(bindings[name]) for name in ("x", "cos", "sin", "turned")]
    if any(one is None for one in shapes):
        return False
    x, cos, sin, turned = (one[0] for one in shapes if one is not None)
    dim = x[-1] if x else 0
    if len(x) != 4 or dim % 2 or any(len(one) != 4 or one[3] != dim for one in (cos, sin)):
        return False
    if any(size not in (1, own) for one in (cos, sin) for size, own in zip(one, x, strict=True)):
        return False
    wanted = ((0, dim // 2, 1), (dim // 2, dim, 1)) if halves else ((0, dim, 2), (1, dim, 2))
    slices = tuple(_last_axis_slice(graph, probe, bindings[name], dim) for name in ("first", "second"))
    return slices == wanted and turned == (x if halves else (*x[:3], dim // 2, 2))


def _last_axis_slice(graph: GraphView, probe: ShapeProbe, value: str, size: int) -> tuple[int, int, int] | None:
    """The begin, end and step of a Slice of the last axis, which has that size."""
    node = graph.producer(value)
    constants = [graph.constant(name) for name in node.inputs[1:]] if node else []
    if len(constants) not in (3, 4) or any(one is None or one.size != 1 for one in constants):
        return None
    begin, end, axis, step = (*(int(one.ravel()[0]) for one in constants if one is not None), 1)[:4]
    rank = len((probe.shapes(value) or [()])[0])
    return slice(begin, end, step).indices(size) if step > 0 and rank and axis % rank == rank - 1 else None


def _has_equal_halves(graph: GraphView, probe: ShapeProbe, value: str, halves: bool) -> bool:
    """Whether the value's halves, or neighbours, on the last axis are alike: it is computed for a step, however it is
    written.
    """
    program = graph.program
    part = replace(program, outputs=(Value(value, "float32", None),)).select_outputs([value])
    arrays = {name: tensor.to_device() for name, tensor in part.tensors.items()}
    try:
        found = ProgramModule(part, arrays)(**make_step_inputs(program, probe.signature, *PROBE_SIZES[0]))[value]
    except ops.OperatorError:
        return False
    first, second = mx.split(found, 2, axis=-1) if halves else (found[..., ::2], found[..., 1::2])
    return bool(mx.all(first == second))
