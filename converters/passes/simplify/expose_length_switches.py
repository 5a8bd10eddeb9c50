"""Length switches: where a graph compares the total length of a step with a constant, it gets that length as an input.

The builder of onnxruntime-genai writes longrope so: an `If` on `total length > original length` gives the tables of
cosines and sines, or, for devices without `If`, the positions of a long row begin after the first table's. The graph
reads the length off its mask or its positions, and takes a chunk of a long prompt, or padding, for the whole of it. As
an input that is known while a step is traced it is the length of the rows, and it leaves the graph free of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe
from mlx_transmuter.program import Node, Program
from mlx_transmuter.program.length_switches import TOTAL_LENGTH, TOTAL_LENGTH_INPUT, LengthSwitches
from mlx_transmuter.program.signature import POSITIONS_INPUT

# `x op constant` for integers x, as SWITCH_OPS have it: the operator, and the greatest x for which > does not hold.
_AS_SWITCH = {
    "Greater": ("Greater-9", lambda bound: math.floor(bound)),
    "GreaterOrEqual": ("Greater-9", lambda bound: math.ceil(bound) - 1),
    "Less": ("LessOrEqual-12", lambda bound: math.ceil(bound) - 1),
    "LessOrEqual": ("LessOrEqual-12", lambda bound: math.floor(bound)),
}
_MIRRORED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual", "Less": "Greater", "LessOrEqual": "GreaterOrEqual"}
_SAME_VALUE_OPS = ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape")


def expose_length_switches(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces comparisons of a step's total length with a constant by those of the input `total_length`."""
    probe = graph.shape_probe
    if probe is None or probe.signature.uses_pools:
        return
    for node in graph.nodes:
        if not is_op_type(node, *_AS_SWITCH):
            continue
        for value, other, op_type in ((0, 1, node.op_type), (1, 0, _MIRRORED[node.op_type])):
            bound = graph.scalar(node.inputs[other])
            offset = None if bound is None else _offset_from_total_length(graph, probe, node.inputs[value])
            shapes = set(probe.shapes(node.outputs[0]) or ())
            if bound is None or not math.isfinite(bound) or offset is None or len(shapes) != 1:
                continue
            op, last_length = _AS_SWITCH[op_type]
            length, name = last_length(bound - offset), f"{node.outputs[0]}.length"
            if 0 < length < 2**31:
                yield Replacement(
                    node,
                    (Node(op, (TOTAL_LENGTH_INPUT, name), node.outputs, {}, node.name),),
                    constants={name: np.full(shapes.pop(), length, np.int64)},
                    program_inputs=(TOTAL_LENGTH,),
                )


def fix_side(program: Program, exposed: Program, side: int) -> Program:
    """Returns the program, as its file has it, with its length switches as for rows on a side.

    exposed: the program after expose_length_switches, and the passes before it, which keep the names of values.
    """
    total_length, values = LengthSwitches.from_program(exposed).total_length(side), {}
    for node in exposed.nodes:
        if TOTAL_LENGTH_INPUT in node.inputs:
            is_longer = total_length > exposed.constants[node.inputs[1]]
            values[node.outputs[0]] = np.asarray(is_longer == is_op_type(node, "Greater"))
    nodes = [node for node in program.nodes if node.outputs[0] not in values]
    return replace(program, nodes=nodes, constants={**program.constants, **values}).select_outputs(
        [value.name for value in program.outputs]
    )


def _offset_from_total_length(graph: GraphView, probe: ShapeProbe, name: str) -> float | None:
    """Returns the number c for which the value is one number, the tokens of a row with those of the step plus c, or
    None for any other value.
    """
    values = [values.get(name) for values in probe.step_values]
    numbers = [v.item() for v in values if isinstance(v, np.ndarray) and v.size == 1 and v.dtype.kind in "if"]
    if len(numbers) == len(values):
        lengths = [size.seq + (size.past if probe.signature.pairs else 0) for size in PROBE_SIZES]
        offsets = {number - length for number, length in zip(numbers, lengths, strict=True)}
        return offsets.pop() if len(offsets) == 1 else None
    node = graph.producer(name)
    if node is None:
        return None
    if is_op_type(node, *_SAME_VALUE_OPS):
        return _offset_from_total_length(graph, probe, node.inputs[0])
    if is_op_type(node, "ReduceMax"):
        shapes = probe.shapes(name)
        is_number = shapes is not None and all(math.prod(shape) == 1 for shape in shapes)
        return -1 if is_number and _is_positions(graph, node.inputs[0]) else None
    if is_op_type(node, "Add"):
        for value, other in (node.inputs, node.inputs[::-1]):
            added = graph.scalar(other)
            offset = None if added is None else _offset_from_total_length(graph, probe, value)
            if added is not None and offset is not None:
                return offset + added
    return None


def _is_positions(graph: GraphView, name: str) -> bool:
    node = graph.producer(name)
    while node is not None and is_op_type(node, *_SAME_VALUE_OPS):
        name = node.inputs[0]
        node = graph.producer(name)
    return name == POSITIONS_INPUT
