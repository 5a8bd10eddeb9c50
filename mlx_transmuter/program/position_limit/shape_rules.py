"""Rules of operators that move elements, or make some of sizes: what they make of shapes and bounds."""

from __future__ import annotations

import numpy as np

from mlx_transmuter.program.position_limit.bounds import (
    MAX_ELEMENTS,
    UNKNOWN,
    Bounds,
    Shape,
    broadcast,
    join,
)
from mlx_transmuter.program.position_limit.lengths import (
    ONE,
    ROW,
    STEP,
    ZERO,
    Length,
    product,
    total,
)
from mlx_transmuter.program.position_limit.node_bounds import NodeBounds, declare_rule

# Ends of slices from here on mean the end of the axis.
LAST_END = 2**31 - 1


# The same elements


@declare_rule("Cast", "Identity", "CastLike", "com.microsoft.Trilu", "Trilu")
def _same_elements(view: NodeBounds) -> Bounds:
    return view.input(0)


@declare_rule("Reshape", "Flatten")
def _reshape(view: NodeBounds) -> Bounds:
    x, target = view.input(0), view.input(1).elements if view.node.op_type == "Reshape" else None
    if target is None:
        return x.with_shape(None)
    shape: list[Length | None] = []
    for axis, size in enumerate(target):
        if size == ZERO and not view.node.attrs.get("allowzero"):
            size = x.size(axis)
        shape.append(None if size == ZERO.minus(ONE) else size)
    if len(shape) == 1 and x.elements is not None:
        shape = [Length(constant=len(x.elements))]
    return x.with_shape(tuple(shape))


@declare_rule("Unsqueeze")
def _unsqueeze(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    if x.shape is None or axes is None:
        return x.with_shape(None)
    rank = len(x.shape) + len(axes)
    added, rest = {axis % rank for axis in axes}, iter(x.shape)
    return x.with_shape(tuple(ONE if axis in added else next(rest) for axis in range(rank)))


@declare_rule("Squeeze")
def _squeeze(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    if x.shape is None or axes is None:
        return x.with_shape(None)
    dropped = {axis % len(x.shape) for axis in axes}
    return x.with_shape(tuple(size for axis, size in enumerate(x.shape) if axis not in dropped))


@declare_rule("Transpose")
def _transpose(view: NodeBounds) -> Bounds:
    x = view.input(0)
    if x.shape is None:
        return x
    order = view.integers("perm") or list(range(len(x.shape)))[::-1]
    return x.with_shape(tuple(x.size(axis) for axis in order))


@declare_rule("Expand")
def _expand(view: NodeBounds) -> Bounds:
    x = view.input(0)
    return x.with_shape(broadcast(x.shape, view.input(1).elements))


@declare_rule("Tile")
def _tile(view: NodeBounds) -> Bounds:
    x, repeats = view.input(0), view.input(1).elements
    if x.shape is None or repeats is None:
        return x.with_shape(None)
    return x.with_shape(tuple(product(*pair) for pair in zip(x.shape, repeats, strict=True)))


@declare_rule("Concat")
def _concat(view: NodeBounds) -> Bounds:
    joined, (axis,) = view.inputs[0], view.integers("axis") or [0]
    for x in view.inputs[1:]:
        joined = join(joined, x)
    shapes = [x.shape for x in view.inputs]
    elements: Shape | None = None
    if all(x.elements is not None and x.shape is not None and len(x.shape) == 1 for x in view.inputs):
        elements = tuple(element for x in view.inputs for element in x.elements or ())
    if any(shape is None or not -len(shape) <= axis < len(shape) for shape in shapes):
        return Bounds(joined.low, joined.high, None, elements)
    shape = list(next(shape for shape in shapes if shape is not None))
    shape[axis] = total(*(x.size(axis) for x in view.inputs))
    return Bounds(joined.low, joined.high, tuple(shape), elements)


@declare_rule("Split")
def _split(view: NodeBounds) -> list[Bounds]:
    x, (axis,), count = view.input(0), view.integers("axis") or [0], len(view.node.outputs)
    parts = view.integers("split", 1)
    size = x.size(axis)
    if parts is None and size is not None and (total := size.as_constant) is not None:
        parts = [-(-total // count)] * count
    results = []
    for part in range(count):
        shape = None if x.shape is None else list(x.shape)
        if shape is not None and -len(shape) <= axis < len(shape):
            shape[axis] = Length(constant=parts[part]) if parts and part < len(parts) else None
        results.append(Bounds(x.low, x.high, None if shape is None else tuple(shape)))
    return results


@declare_rule("Gather")
def _gather(view: NodeBounds) -> Bounds:
    x, indices, (axis,) = view.input(0), view.input(1), view.integers("axis") or [0]
    numbers = indices.as_constants
    if x.elements is not None and numbers and all(-len(x.elements) <= number < len(x.elements) for number in numbers):
        return Bounds.from_elements([x.elements[number] for number in numbers], scalar=indices.is_scalar)
    shape = None
    if x.shape is not None and indices.shape is not None and -len(x.shape) <= axis < len(x.shape):
        axis %= len(x.shape)
        shape = x.shape[:axis] + indices.shape + x.shape[axis + 1 :]
    return Bounds(x.low, x.high, shape)


@declare_rule("GatherElements")
def _gather_elements(view: NodeBounds) -> Bounds:
    x = view.input(0)
    return Bounds(x.low, x.high, view.input(1).shape)


@declare_rule("Slice")
def _slice(view: NodeBounds) -> Bounds:
    x, slices = view.input(0), slices_of(view)
    if slices is None or x.shape is None:
        return Bounds(x.low, x.high)
    shape = list(x.shape)
    for axis, start, end, step in slices:
        is_whole = start == ZERO and end is not None and (end.as_constant or 0) >= LAST_END
        if not is_whole or step != 1:
            shape[axis] = _sliced_size(shape[axis], start, end) if step == 1 else None
    if x.elements is not None and len(slices) == 1:
        _, start, end, step = slices[0]
        if start is not None and end is not None and None not in (start.as_constant, end.as_constant) and step:
            return Bounds.from_elements(x.elements[start.as_constant : end.as_constant : step])
    return Bounds(x.low, x.high, tuple(shape))


def slices_of(view: NodeBounds) -> list[tuple[int, Length | None, Length | None, int | None]] | None:
    """Returns (axis, start, end, step) of each axis that a Slice cuts; None where that is not known."""
    starts, ends, rank = view.input(1).elements, view.input(2).elements, view.input(0).shape
    if starts is None or ends is None or rank is None:
        return None
    axes = view.input(3).as_constants if view.has_input(3) else list(range(len(starts)))
    steps = view.input(4).as_constants if view.has_input(4) else [1] * len(starts)
    if axes is None or not len(axes) == len(starts) == len(ends):
        return None
    steps = steps or [None] * len(axes)  # type: ignore[list-item]
    return [(axis % len(rank), *cut) for axis, *cut in zip(axes, starts, ends, steps, strict=True) if rank]  # type: ignore[misc]


def is_from_end(number: Length) -> bool:
    """Whether a start or an end of a slice counts from the end of its axis, as negative ones do."""
    return number != ZERO and ZERO.is_at_least(number)


def _sliced_size(size: Length | None, start: Length | None, end: Length | None) -> Length | None:
    if start is None or end is None:
        return None
    if (end.as_constant or 0) >= LAST_END:
        if is_from_end(start):
            return start.times(-1)
        return None if size is None else size.minus(start)
    if is_from_end(start) != is_from_end(end):
        if size is None:
            return None
        start, end = (size.plus(each) if is_from_end(each) else each for each in (start, end))
    return end.minus(start)


# Sizes


@declare_rule("Shape")
def _shape(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    if shape is None:
        return UNKNOWN
    (start,), (end,) = view.integers("start") or [0], view.integers("end") or [len(shape)]
    return Bounds.from_elements(shape[start:end])


@declare_rule("Size")
def _size(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    return UNKNOWN if shape is None else Bounds.from_elements([product(*shape)], scalar=True)


@declare_rule("ConstantOfShape")
def _constant_of_shape(view: NodeBounds) -> Bounds:
    value = view.node.attrs.get("value")
    filled = Bounds.from_array(value) if isinstance(value, np.ndarray) and value.size == 1 else Bounds(ZERO, ZERO)
    count = view.input(0).as_constant
    if count is not None and 0 < count <= MAX_ELEMENTS:
        return Bounds.from_elements([filled.low] * count)
    return Bounds(filled.low, filled.high, view.input(0).elements)


@declare_rule("Range")
def _range(view: NodeBounds) -> Bounds:
    start, limit, delta = (view.input(number) for number in range(3))
    if delta.as_constant != 1 or not limit.elements or limit.elements[0] is None:
        return UNKNOWN
    end = limit.elements[0]
    size = end.minus(start.elements[0]) if start.elements and start.elements[0] is not None else None
    return Bounds(start.low, end.minus(ONE), (size,))


# Sizes alone


@declare_rule(
    *("Softmax", "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Dropout", "Gelu", "Tanh"),
    *("Erf", "Sqrt", "Relu", "Sigmoid", "Exp", "Log", "Cos", "Sin", "Reciprocal", "IsNaN", "FastGelu", "Floor", "Ceil"),
    *("com.microsoft.FastGelu", "com.microsoft.Gelu", "com.microsoft.BiasGelu", "com.microsoft.QuickGelu", "Abs"),
    *("mlx.rms_norm", "mlx.rotary", "com.microsoft.RotaryEmbedding", "RotaryEmbedding"),
)
def _same_shape(view: NodeBounds) -> Bounds:
    return Bounds(shape=view.input(0).shape)


@declare_rule("Pow")
def _broadcast_shape(view: NodeBounds) -> Bounds:
    return Bounds(shape=broadcast(view.input(0).shape, view.input(1).shape))


@declare_rule("MatMul", "com.microsoft.FusedMatMul")
def _matmul(view: NodeBounds) -> Bounds:
    a, b = view.input(0).shape, view.input(1).shape
    if a is None or b is None or len(a) < 2 or len(b) < 2 or view.node.op_type != "MatMul":
        return UNKNOWN
    batch = broadcast(a[:-2], b[:-2])
    return UNKNOWN if batch is None else Bounds(shape=(*batch, a[-2], b[-1]))


@declare_rule("mlx.positions")
def _positions(view: NodeBounds) -> Bounds:
    return Bounds(ZERO, ROW.minus(ONE), (None, STEP))


@declare_rule("mlx.embedding", "mlx.linear")
def _layer(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    if shape is None:
        return UNKNOWN
    return Bounds(shape=(*shape, None) if view.node.op_type == "mlx.embedding" else (*shape[:-1], None))
