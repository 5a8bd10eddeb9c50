"""Rotary embedding: the rotation of halves, or of neighbors, that exporters write in several nodes becomes one."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.patterns import Bindings, Op, Var, match_pattern
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe, make_step_inputs
from mlx_transmuter.converters.graph.slices import slice_of
from mlx_transmuter.converters.graph.subgraph import evaluate_outputs
from mlx_transmuter.program import Node

_X = Var("x")
_NEGATED_SECOND_PART, _FIRST_PART = Op("Neg", Op("Slice", _X, name="second")), Op("Slice", _X, name="first")


def _rotation_pattern(rotated_part: Op) -> Op:
    return Op("Add", Op("Mul", _X, Var("cos")), Op("Mul", rotated_part, Var("sin")))


ROTATE_HALVES_PATTERN = _rotation_pattern(Op("Concat", _NEGATED_SECOND_PART, _FIRST_PART, name="rotated"))
ROTATE_PAIRS_PATTERN = _rotation_pattern(
    Op("Reshape", Op("Concat", Op("Unsqueeze", _NEGATED_SECOND_PART), Op("Unsqueeze", _FIRST_PART), name="rotated"))
)


def fuse_rotary_embedding(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces x · cos + [−x₂, x₁] · sin by mlx.rotary, where x₁ and x₂ are the halves of x or its neighbors.

    cos and sin must be the same for both. Su et al. 2021.
    """
    probe = graph.shape_probe
    if probe is None:
        return
    equal_tables: dict[tuple[str, bool], bool] = {}
    for node in graph.nodes:
        if not is_op_type(node, "Add"):
            continue
        bindings = match_pattern(graph, node, ROTATE_HALVES_PATTERN)
        halves = bindings is not None
        bindings = bindings or match_pattern(graph, node, ROTATE_PAIRS_PATTERN)
        if bindings is None or not _is_rotation(graph, probe, bindings, halves):
            continue
        tables = (bindings["cos"], bindings["sin"])
        for table in tables:
            if (table, halves) not in equal_tables:
                equal_tables[table, halves] = _has_equal_halves(graph, probe, table, halves)
        if all(equal_tables[table, halves] for table in tables):
            attrs = {} if halves else {"interleaved": 1}
            yield Replacement(node, (Node("mlx.rotary", (bindings["x"], *tables), node.outputs, attrs, node.name),))


def _is_rotation(graph: GraphView, probe: ShapeProbe, bindings: Bindings, halves: bool) -> bool:
    """Returns whether the slices are x₁ and x₂, in one tensor of x's size, and cos and sin broadcast with it."""
    shapes = [probe.shapes(bindings[name]) for name in ("x", "cos", "sin", "rotated")]
    x, cos, sin, rotated = (step_shapes[0] if step_shapes else () for step_shapes in shapes)
    dim = x[-1] if x else 0
    if len(x) != 4 or dim % 2 or any(len(table) != 4 or table[3] != dim for table in (cos, sin)):
        return False
    if any(size not in (1, full) for table in (cos, sin) for size, full in zip(table, x, strict=True)):
        return False
    expected = ((0, dim // 2, 1), (dim // 2, dim, 1)) if halves else ((0, dim, 2), (1, dim, 2))
    slices = tuple(_last_axis_slice(graph, probe, bindings[name], dim) for name in ("first", "second"))
    return slices == expected and rotated == (x if halves else (*x[:3], dim // 2, 2))


def _last_axis_slice(graph: GraphView, probe: ShapeProbe, value: str, size: int) -> tuple[int, int, int] | None:
    """Returns begin, end and step of the Slice of the last axis, of that size, that the value is; else None."""
    node, shapes = graph.producer(value), probe.shapes(value)
    part = slice_of(graph, probe, node) if node is not None else None
    if part is None or not shapes or part.step <= 0 or part.axis != len(shapes[0]) - 1:
        return None
    return part.indices(size)


def _has_equal_halves(graph: GraphView, probe: ShapeProbe, table: str, halves: bool) -> bool:
    """Returns whether the halves of a table, or its neighbors, are equal on the last axis in a step of the probe."""
    inputs = make_step_inputs(graph.program, probe.signature, *PROBE_SIZES[0])
    try:
        array = evaluate_outputs(graph.program, inputs, [table])[table]
    except ops.OperatorError:
        return False
    first, second = mx.split(array, 2, axis=-1) if halves else (array[..., ::2], array[..., 1::2])
    return bool(mx.all(first == second))
