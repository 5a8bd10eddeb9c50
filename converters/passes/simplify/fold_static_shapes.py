"""Static shapes: what no step size changes becomes a constant, sizes of a step are read off its tokens, and nodes that
change nothing go.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mlx_transmuter.converters.graph.constant_budget import ConstantBudget
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import COPY_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS, Node

# What sizes go through before they are used.
_SIZE_OPS = (
    "Shape", "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Add", "Sub", "Mul", "Neg",
    "Min", "Max",
)  # fmt: skip
# Operators whose output is their first input itself where it has the input's shape.
_ORDER_KEEPING_OPS = (*COPY_OPS, "Flatten", "Dropout", "Pad")


def fold_static_shapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces nodes by what the shape probe shows of them:

    - host values that are equal in every probe step by constants,
    - numbers of rows and tokens that are read off the past or the mask by sizes of the tokens,
    - nodes that change nothing by their input,
    - the shape of a Reshape that keeps sizes by a constant with 0 (as it was) and -1 (the rest).
    """
    probe = graph.shape_probe
    if probe is None:
        return
    step_sizes, budget = _find_step_sizes(graph, probe), ConstantBudget()
    for node in graph.nodes:
        replacement = _constant_outputs(probe, node, budget)
        if replacement is None and node.outputs[0] in step_sizes:
            replacement = _read_size_from_tokens(probe.signature.token_input, node, *step_sizes[node.outputs[0]])
        if replacement is None and (source := _find_identity_input(graph, probe, node)) is not None:
            replacement = Replacement(node, (), aliases={node.outputs[0]: source})
        if replacement is None and is_op_type(node, "Reshape") and graph.constant(node.inputs[1]) is None:
            replacement = _static_reshape(probe, node)
        if replacement is not None:
            yield replacement


def _constant_outputs(probe: ShapeProbe, node: Node, budget: ConstantBudget) -> Replacement | None:
    """Returns the replacement of a node whose outputs are small constants, or None."""
    values = {name: probe.constant_value(name) for name in node.outputs if name}
    constants = {
        name: value for name, value in values.items() if value is not None and value.size <= MAX_CONSTANT_ELEMENTS
    }
    if not constants or len(constants) < len(values) or not budget.take(constants.values()):
        return None
    return Replacement(node, (), constants=constants)


def _find_step_sizes(graph: GraphView, probe: ShapeProbe) -> dict[str, tuple[int, int]]:
    """Returns the host values that are the number of rows or tokens, read off the sizes of past, present or mask.

    name -> (the axis of the tokens that has this size, the value's rank).
    """
    signature, step_sizes = probe.signature, {}
    reached = {name for pair in signature.cache_pairs for name in (pair.past, pair.present)} | {signature.mask_input}
    axes = ((0, [size.rows for size in PROBE_SIZES]), (1, [size.seq for size in PROBE_SIZES]))
    for node in graph.nodes:
        if not is_op_type(node, *_SIZE_OPS) or len(node.outputs) != 1 or reached.isdisjoint(node.inputs):
            continue
        name = node.outputs[0]
        values = probe.host_integers(name)
        if values is None:
            continue
        reached.add(name)
        if any(value.size != 1 or value.ndim > 1 for value in values):
            continue
        for axis, sizes in axes:
            if [value.item() for value in values] == sizes:
                step_sizes[name] = (axis, values[0].ndim)
    return step_sizes


def _read_size_from_tokens(tokens: str, node: Node, axis: int, rank: int) -> Replacement:
    """Returns the replacement of the node by the size of that axis of the tokens, as a value of that rank (0 or 1)."""
    name = node.outputs[0]
    if rank:
        return Replacement(node, (Node("Shape-1", (tokens,), (name,), {"start": axis, "end": axis + 1}, node.name),))
    shape, axis_name = Node("Shape-1", (tokens,), (f"{name}.sizes",)), f"{name}.axis"
    size = Node("Gather-1", (shape.outputs[0], axis_name), (name,), {"axis": 0}, node.name)
    return Replacement(node, (shape, size), constants={axis_name: np.array(axis, np.int64)})


def _find_identity_input(graph: GraphView, probe: ShapeProbe, node: Node) -> str | None:
    """Returns the input that the node's output is equal to, or None."""
    if is_op_type(node, "Concat"):
        return _only_filled_input(probe, node)
    source, output = node.inputs[0] if node.inputs else "", node.outputs[0]
    if not source or probe.dtype(source) is None or probe.dtype(source) != probe.dtype(output):
        other = node.inputs[1] if len(node.inputs) == 2 else ""
        if not (is_op_type(node, "Mul") and other and probe.dtype(other) == probe.dtype(output)):
            return None
        source = other
    if probe.shapes(source) != probe.shapes(output) or any(node.outputs[1:]):
        return None
    return source if _keeps_elements(graph, node, source) else None


def _only_filled_input(probe: ShapeProbe, concat: Node) -> str | None:
    """Returns the only input of a Concat that has elements, if its shape is that of the output."""
    shapes = {name: probe.shapes(name) for name in concat.inputs}
    filled = [name for name in concat.inputs if not all(0 in shape for shape in shapes[name] or [()])]
    return filled[0] if len(filled) == 1 and shapes[filled[0]] == probe.shapes(concat.outputs[0]) else None


def _keeps_elements(graph: GraphView, node: Node, source: str) -> bool:
    """Returns whether the node's output, of the shape and type of its input `source`, has the same elements too."""
    if is_op_type(node, "Slice"):
        steps = graph.constant(node.inputs[4]) if len(node.inputs) > 4 else None
        return steps is None or bool((steps > 0).all())
    if is_op_type(node, "Transpose"):
        perm = list(node.attrs.get("perm", ()))
        return bool(perm) and perm == sorted(perm)
    if is_op_type(node, "Mul"):
        factors = [graph.constant(name) for name in node.inputs if name != source]
        return len(factors) == 1 and factors[0] is not None and bool((factors[0] == 1).all())
    return is_op_type(node, "Cast", *_ORDER_KEEPING_OPS)


def _static_reshape(probe: ShapeProbe, node: Node) -> Replacement | None:
    """Returns the replacement of a Reshape by one with a constant shape that holds for every step size, or None."""
    shape = _static_reshape_shape(probe, node)
    if shape is None:
        return None
    name = f"{node.outputs[0]}.shape"
    attrs = {key: value for key, value in node.attrs.items() if key != "allowzero"}
    reshape = replace(node, inputs=(node.inputs[0], name), attrs=attrs)
    return Replacement(node, (reshape,), constants={name: np.array(shape, np.int64)})


def _static_reshape_shape(probe: ShapeProbe, node: Node) -> list[int] | None:
    """Returns a shape with 0 for sizes that stay as they were and -1 for the rest, or None where there is none."""
    before, after = probe.shapes(node.inputs[0]), probe.shapes(node.outputs[0])
    if before is None or after is None:
        return None
    shape = []
    for axis in range(len(after[0])):
        sizes = {new[axis] for new in after}
        if len(sizes) == 1:
            size = sizes.pop()
            if size == 0:  # in a shape it would mean the size of before
                return None
            shape.append(size)
        elif all(axis < len(old) and old[axis] == new[axis] for old, new in zip(before, after, strict=True)):
            shape.append(0)
        else:
            shape.append(-1)
    return shape if shape.count(-1) <= 1 else None
