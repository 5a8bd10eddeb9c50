"""The tables of a graph that positions index: past their last row a step would read whatever lies there."""

from __future__ import annotations

from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.operator_sets import RESHAPE_OPS
from mlx_transmuter.program import Program
from mlx_transmuter.program.layer_arrays import array_name

_SAME_VALUE_OPS = (*RESHAPE_OPS, "Cast")


def position_table_rows(program: Program) -> int | None:
    """Returns the most positions that the tables of positions have rows for, or None for a program without such tables.

    A table may be read at an offset: its first rows are then no positions.
    """
    offsets, limits = {"position_ids": 0}, []
    for node in program.nodes:
        offset = next((offsets[name] for name in node.inputs if name in offsets), None)
        if offset is None:
            continue
        if node.op == "mlx.embedding":
            limits.append(program.weights[array_name(node.inputs[1], "weight")].shape[0] - offset)
        elif is_op_type(node, "Add"):
            added = next((program.constants[name] for name in node.inputs if name in program.constants), None)
            if added is not None and added.size:
                offsets |= dict.fromkeys(node.outputs, offset + int(added.max()))
        elif is_op_type(node, *_SAME_VALUE_OPS):
            offsets |= dict.fromkeys(node.outputs, offset)
    return min(limits, default=None)
