"""Settle: what the sizes of a step don't change becomes a constant, what is one of them is read off the tokens, and
what changes nothing goes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.shape_probe import PROBE_SIZES, ShapeProbe
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS, Node

# What sizes go through before they are used.
_SIZE_OPS = (
    "Gather", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Add", "Sub", "Mul", "Neg", "Min", "Max",
)  # fmt: skip
# Operators that give their first input's elements in its order: with the same shape they give the input itself.
_ORDER_KEEPING_OPS = (
    "Reshape",
    "Expand",
    "Slice",
    "Unsqueeze",
    "Squeeze",
    "Flatten",
    "Identity",
    "Tile",
    "Dropout",
    "Pad",
)


def fold_static_shapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Host values that are the same in steps of every size → constants; nodes that change nothing → their input; the
    shape of a Reshape that only keeps sizes → a constant with 0 (as it was) and -1 (the rest); the numbers of rows and
    tokens, where they are read off the past or the mask → read off the tokens."""
    seen = graph.shape_probe
    if seen is None:
        return
    sized = _find_step_sizes(graph, seen)
    for node in graph.nodes:
        values = {name: seen.constant_value(name) for name in node.outputs if name}
        known = {
            name: value for name, value in values.items() if value is not None and value.size <= MAX_CONSTANT_ELEMENTS
        }
        if known and len(known) == len(values):
            yield Replacement(node, (), constants=known)
        elif node.outputs[0] in sized:
            yield _read_size_from_tokens(seen.signature.token_input, node, sized[node.outputs[0]])
        elif (source := _find_identity_input(graph, seen, node)) is not None:
            yield Replacement(node, (), aliases={node.outputs[0]: source})
        elif is_op_type(node, "Reshape") and graph.constant(node.inputs[1]) is None:
            shape = _static_reshape_shape(seen, node)
            if shape is not None:
                name = f"{node.outputs[0]}.shape"
                attrs = {key: value for key, value in node.attrs.items() if key != "allowzero"}
                yield Replacement(
                    node,
                    (Node(node.op, (node.inputs[0], name), node.outputs, attrs, node.name),),
                    constants={name: np.array(shape, np.int64)},
                )


def _find_step_sizes(graph: GraphView, probe: ShapeProbe) -> dict[str, tuple[int, int]]:
    """The values on the host that come from the sizes of past, present or mask and are the number of rows or of tokens:
    the axis of the tokens that has it, and the value's rank."""
    signature, found = probe.signature, {}
    reached = {name for entry in signature.cache_pairs for name in (entry.past, entry.present)} | {signature.mask_input}
    for node in graph.nodes:
        if not (is_op_type(node, "Shape") or is_op_type(node, *_SIZE_OPS)):
            continue
        if len(node.outputs) != 1 or not any(name in reached for name in node.inputs):
            continue
        name = node.outputs[0]
        values = [one.get(name) for one in probe.step_values]
        if not all(isinstance(value, np.ndarray) and value.dtype.kind == "i" for value in values):
            continue
        reached.add(name)
        for axis, at in ((0, 0), (1, 2)):
            wanted = [trial[at] for trial in PROBE_SIZES]
            if all(v.size == 1 and v.ndim <= 1 and v.item() == w for v, w in zip(values, wanted, strict=True)):  # type: ignore[union-attr]
                found[name] = (axis, values[0].ndim)  # type: ignore[union-attr]
    return found


def _read_size_from_tokens(tokens: str, node: Node, axis_and_rank: tuple[int, int]) -> Replacement:
    """The node as the size of that axis of the tokens, of that rank."""
    (axis, rank), name = axis_and_rank, node.outputs[0]
    if rank:
        return Replacement(node, (Node("Shape-1", (tokens,), (name,), {"start": axis, "end": axis + 1}, node.name),))
    sizes, at = Node("Shape-1", (tokens,), (f"{name}.sizes",)), f"{name}.axis"
    picked = Node("Gather-1", (sizes.outputs[0], at), (name,), {"axis": 0}, node.name)
    return Replacement(node, (sizes, picked), constants={at: np.array(axis, np.int64)})


def _find_identity_input(graph: GraphView, probe: ShapeProbe, node: Node) -> str | None:
    """The input that the node gives as it is, or None."""
    if is_op_type(node, "Concat"):
        shapes = {name: probe.shapes(name) for name in node.inputs}
        filled = [name for name in node.inputs if not all(0 in shape for shape in shapes[name] or [()])]
        return filled[0] if len(filled) == 1 and shapes[filled[0]] == probe.shapes(node.outputs[0]) else None
    source, output = node.inputs[0] if node.inputs else "", node.outputs[0]
    if not source or probe.dtype(source) is None or probe.dtype(source) != probe.dtype(output):
        other = node.inputs[1] if len(node.inputs) == 2 else ""
        if not (is_op_type(node, "Mul") and other and probe.dtype(other) == probe.dtype(output)):
            return None
        source = other
    if probe.shapes(source) != probe.shapes(output) or any(name for name in node.outputs[1:]):
        return None
    if is_op_type(node, *_ORDER_KEEPING_OPS):
        steps = graph.constant(node.inputs[4]) if is_op_type(node, "Slice") and len(node.inputs) > 4 else None
        return source if steps is None or (steps > 0).all() else None
    if is_op_type(node, "Cast"):
        return source
    if is_op_type(node, "Transpose"):
        perm = list(node.attrs.get("perm", ()))
        return source if perm == sorted(perm) and perm else None
    if is_op_type(node, "Mul"):
        factors = [graph.constant(name) for name in node.inputs if name != source]
        return source if len(factors) == 1 and factors[0] is not None and (factors[0] == 1).all() else None
    return None


def _static_reshape_shape(probe: ShapeProbe, node: Node) -> list[int] | None:
    """A constant shape that means the same in every trial, or None."""
    before, after = probe.shapes(node.inputs[0]), probe.shapes(node.outputs[0])
    if before is None or after is None:
        return None
    shape = []
    for axis in range(len(after[0])):
        sizes = {one[axis] for one in after}
        if len(sizes) == 1:
            shape.append(sizes.pop())
        elif all(axis < len(old) and old[axis] == new[axis] for old, new in zip(before, after, strict=True)):
            shape.append(0)
        else:
            shape.append(-1)
    return (
        shape
        if shape.count(-1) <= 1
        and not any(size == 0 and len({o[i] for o in after}) == 1 for i, size in enumerate(shape))
        else None
    )
