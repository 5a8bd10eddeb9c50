"""What operators make of bounds: the integers and the sizes of their results, from those of their inputs.

A rule is a function of a NodeBounds that returns the Bounds of the results, or of the first one alone. An operator
without a rule gives values of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_transmuter.program.position_limit.bounds import (
    MAX_ELEMENTS,
    UNKNOWN,
    Bounds,
    Comparison,
    Shape,
    broadcast,
    join,
)
from mlx_transmuter.program.position_limit.lengths import ONE, ROW, STEP, ZERO, Length, TokenRange, larger, smaller
from mlx_transmuter.program.program import Node

# Ends of slices from here on mean the end of the axis.
LAST_END = 2**31 - 1
# No size is a product of more; a hostile program multiplies numbers without end.
_MAX_FACTOR = 2**62


class NodeBounds:
    """A node with the bounds of its inputs.

    bounds_of: returns the bounds of any value by name. tokens: the rows that are looked at. splits: where a comparison
    depends on the tokens of a row, its last tokens before it changes, for the walk to look at both sides.
    """

    def __init__(
        self,
        node: Node,
        inputs: list[Bounds],
        bounds_of: Callable[[str], Bounds],
        tokens: TokenRange,
        splits: set[int],
    ):
        self.node, self.inputs, self.bounds_of, self.tokens, self.splits = node, inputs, bounds_of, tokens, splits

    def input(self, number: int) -> Bounds:
        """Returns the bounds of an input; UNKNOWN for one that is left out."""
        return self.inputs[number] if number < len(self.inputs) else UNKNOWN

    def has_input(self, number: int) -> bool:
        """Whether the node has the input."""
        return number < len(self.node.inputs) and bool(self.node.inputs[number])

    def integers(self, attribute: str, number: int | None = None) -> list[int] | None:
        """Returns the constant integers of an attribute, else of an input; None where there are none."""
        value = self.node.attrs.get(attribute)
        if isinstance(value, int):
            return [value]
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            return list(value)
        return None if number is None else self.input(number).as_constants

    def is_positive(self, number: Length) -> bool | None:
        """Whether a number is above 0 in all rows that are looked at; None where that differs."""
        is_positive = self.tokens.is_positive(number)
        if is_positive is None and (split := number.changes_sign_after) is not None:
            self.splits.add(split)
        return is_positive


Rule = Callable[[NodeBounds], Any]
RULES: dict[str, Rule] = {}


def _rule(*op_types: str) -> Callable[[Rule], Rule]:
    def declare(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, function))
        return function

    return declare


def apply_rule(view: NodeBounds) -> list[Bounds]:
    """Returns the bounds of a node's outputs, of which those of a node that asks the impossible are unknown: it fails
    where it runs."""
    try:
        results = RULES.get(view.node.op_type, _unknown)(view)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        results = UNKNOWN
    results = [results.limit()] if isinstance(results, Bounds) else [result.limit() for result in results]
    return results + [UNKNOWN] * (len(view.node.outputs) - len(results))


def _unknown(view: NodeBounds) -> Bounds:
    return UNKNOWN


# The same elements


@_rule("Cast", "Identity", "CastLike", "com.microsoft.Trilu", "Trilu")
def _same_elements(view: NodeBounds) -> Bounds:
    return view.input(0)


@_rule("Reshape", "Flatten")
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


@_rule("Unsqueeze")
def _unsqueeze(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    if x.shape is None or axes is None:
        return x.with_shape(None)
    rank = len(x.shape) + len(axes)
    added, rest = {axis % rank for axis in axes}, iter(x.shape)
    return x.with_shape(tuple(ONE if axis in added else next(rest) for axis in range(rank)))


@_rule("Squeeze")
def _squeeze(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    if x.shape is None or axes is None:
        return x.with_shape(None)
    dropped = {axis % len(x.shape) for axis in axes}
    return x.with_shape(tuple(size for axis, size in enumerate(x.shape) if axis not in dropped))


@_rule("Transpose")
def _transpose(view: NodeBounds) -> Bounds:
    x = view.input(0)
    if x.shape is None:
        return x
    order = view.integers("perm") or list(range(len(x.shape)))[::-1]
    return x.with_shape(tuple(x.size(axis) for axis in order))


@_rule("Expand")
def _expand(view: NodeBounds) -> Bounds:
    x = view.input(0)
    return x.with_shape(broadcast(x.shape, view.input(1).elements))


@_rule("Tile")
def _tile(view: NodeBounds) -> Bounds:
    x, repeats = view.input(0), view.input(1).elements
    if x.shape is None or repeats is None:
        return x.with_shape(None)
    return x.with_shape(tuple(_product(*pair) for pair in zip(x.shape, repeats, strict=True)))


@_rule("Concat")
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
    shape[axis] = _sum([x.size(axis) for x in view.inputs])
    return Bounds(joined.low, joined.high, tuple(shape), elements)


@_rule("Split")
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


@_rule("Gather")
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


@_rule("GatherElements")
def _gather_elements(view: NodeBounds) -> Bounds:
    x = view.input(0)
    return Bounds(x.low, x.high, view.input(1).shape)


@_rule("Slice")
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


@_rule("Shape")
def _shape(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    if shape is None:
        return UNKNOWN
    (start,), (end,) = view.integers("start") or [0], view.integers("end") or [len(shape)]
    return Bounds.from_elements(shape[start:end])


@_rule("Size")
def _size(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    return UNKNOWN if shape is None else Bounds.from_elements([_product(*shape)], scalar=True)


@_rule("ConstantOfShape")
def _constant_of_shape(view: NodeBounds) -> Bounds:
    value = view.node.attrs.get("value")
    filled = Bounds.from_array(value) if isinstance(value, np.ndarray) and value.size == 1 else Bounds(ZERO, ZERO)
    count = view.input(0).as_constant
    if count is not None and 0 < count <= MAX_ELEMENTS:
        return Bounds.from_elements([filled.low] * count)
    return Bounds(filled.low, filled.high, view.input(0).elements)


@_rule("Range")
def _range(view: NodeBounds) -> Bounds:
    start, limit, delta = (view.input(number) for number in range(3))
    if delta.as_constant != 1 or not limit.elements or limit.elements[0] is None:
        return UNKNOWN
    end = limit.elements[0]
    size = end.minus(start.elements[0]) if start.elements and start.elements[0] is not None else None
    return Bounds(start.low, end.minus(ONE), (size,))


# Arithmetic


def _elementwise(view: NodeBounds, function: Callable[[Length | None, Length | None], Length | None]) -> Shape | None:
    """Returns the elements of an operator of two vectors or scalars."""
    a, b = view.input(0).elements, view.input(1).elements
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    size = max(len(a), len(b))
    a, b = (x * size if len(x) == 1 else x for x in (a, b))
    return tuple(function(x, y) for x, y in zip(a, b, strict=True))


def _binary(
    view: NodeBounds,
    low: Length | None,
    high: Length | None,
    function: Callable[[Length, Length], Length | None],
) -> Bounds:
    shape = broadcast(view.input(0).shape, view.input(1).shape)
    elements = _elementwise(view, lambda a, b: None if a is None or b is None else function(a, b))
    if elements is not None and None not in elements:
        exact = Bounds.from_elements(elements)
        low, high = exact.low, exact.high
    return Bounds(low, high, shape, elements if shape is not None and len(shape) < 2 else None)


@_rule("Add")
def _add(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    return _binary(view, _sum([a.low, b.low]), _sum([a.high, b.high]), Length.plus)


@_rule("Sub")
def _sub(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    low = None if a.low is None or b.high is None else a.low.minus(b.high)
    high = None if a.high is None or b.low is None else a.high.minus(b.low)
    return _binary(view, low, high, Length.minus)


@_rule("Neg")
def _neg(view: NodeBounds) -> Bounds:
    x = view.input(0).map(lambda number: number.times(-1))
    return Bounds(x.high, x.low, x.shape, x.elements)


@_rule("Mul")
def _mul(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    low = high = None
    if all(x.low is not None and x.low.is_at_least(ZERO) for x in (a, b)):
        low, high = ZERO, _product(a.high, b.high)
    return _binary(view, low, high, _product)


@_rule("Div")
def _div(view: NodeBounds) -> Bounds:
    a, divisor = view.input(0), view.input(1).as_constant

    def divide(x: Length, y: Length) -> Length | None:
        by = y.as_constant
        return None if not by or any(part % by for part in x) else Length(*(part // by for part in x))

    high = a.high if divisor is not None and divisor > 0 and a.low is not None and a.low.is_at_least(ZERO) else None
    return _binary(view, ZERO if high else None, high, divide)


@_rule("Mod")
def _mod(view: NodeBounds) -> Bounds:
    divisor, shape = view.input(1).as_constant, broadcast(view.input(0).shape, view.input(1).shape)
    return Bounds(ZERO, Length(constant=divisor - 1), shape) if divisor and divisor > 0 else Bounds(shape=shape)


@_rule("Max", "Min", "Clip")
def _min_max(view: NodeBounds) -> Bounds:
    op_type = view.node.op_type
    pairs = [("Max", 1), ("Min", 2)] if op_type == "Clip" else [(op_type, n) for n in range(1, len(view.inputs))]
    result = view.input(0)
    for kind, number in pairs:
        if view.has_input(number):
            result = _larger_or_smaller(view, kind == "Max", result, view.input(number))
    return result


def _larger_or_smaller(view: NodeBounds, take_larger: bool, a: Bounds, b: Bounds) -> Bounds:
    def choose(x: Length, y: Length) -> Length | None:
        is_larger = view.is_positive(x.minus(y))
        if is_larger is None:
            return None
        return x if is_larger == take_larger else y

    # On one side the bound of one of them alone bounds the result.
    if take_larger:
        low, high = larger(a.low, b.low) or a.low or b.low, larger(a.high, b.high)
    else:
        low, high = smaller(a.low, b.low), smaller(a.high, b.high) or a.high or b.high
    pair = NodeBounds(view.node, [a, b], view.bounds_of, view.tokens, view.splits)
    return _binary(pair, low, high, choose)


@_rule("CumSum")
def _cum_sum(view: NodeBounds) -> Bounds:
    x, axis = view.input(0), view.input(1).as_constant
    size = None if axis is None else x.size(axis)
    return Bounds(_at_least_zero(x), _sum_of(x, size), x.shape)


@_rule("ReduceSum")
def _reduce_sum(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    size = _product(*(x.size(axis) for axis in axes)) if axes else None
    return Bounds(_at_least_zero(x), _sum_of(x, size), _reduced_shape(view, axes))


@_rule("ReduceMax")
def _reduce_max(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    if not view.has_input(1) and "axes" not in view.node.attrs and not view.node.attrs.get("keepdims", 1):
        # Of positions the newest token has the largest.
        return Bounds.from_elements([x.high], scalar=True)
    return Bounds(x.low, x.high, _reduced_shape(view, axes))


def _reduced_shape(view: NodeBounds, axes: list[int] | None) -> Shape | None:
    shape = view.input(0).shape
    if shape is None or axes is None:
        return None
    reduced, keeps = {axis % len(shape) for axis in axes}, view.node.attrs.get("keepdims", 1)
    return tuple(ONE if n in reduced else size for n, size in enumerate(shape) if keeps or n not in reduced)


def _at_least_zero(x: Bounds) -> Length | None:
    return ZERO if x.low is not None and x.low.is_at_least(ZERO) else None


def _sum_of(x: Bounds, count: Length | None) -> Length | None:
    """Returns the most of a sum of `count` elements."""
    return _product(x.high, count) if _at_least_zero(x) is not None else None


def _sum(numbers: list[Length | None]) -> Length | None:
    total = ZERO
    for number in numbers:
        if number is None:
            return None
        total = total.plus(number)
    return total


def _product(*numbers: Length | None) -> Length | None:
    """Returns the product of numbers of which at most one is no constant; else None."""
    factor, rest = 1, ONE
    for number in numbers:
        if number is None:
            return None
        if (constant := number.as_constant) is not None:
            factor *= constant
        elif rest == ONE:
            rest = number
        else:
            return None
    return None if abs(factor) > _MAX_FACTOR else rest.times(factor)


# Comparisons


@_rule("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
def _compare(view: NodeBounds) -> Bounds:
    op_type = view.node.op_type
    is_swapped, is_strict = op_type.startswith("Greater"), not op_type.endswith("OrEqual")

    def holds(a: Length, b: Length) -> Length | None:
        small, large = (b, a) if is_swapped else (a, b)
        if is_strict:
            is_below = view.is_positive(large.minus(small))
        else:
            is_above = view.is_positive(small.minus(large))
            is_below = None if is_above is None else not is_above
        return None if is_below is None else Length(constant=int(is_below))

    left, right = view.node.inputs[:2][:: -1 if is_swapped else 1]
    return _binary(view, ZERO, ONE, holds)._replace(comparison=Comparison(left, right, is_strict))


@_rule("Equal")
def _equal(view: NodeBounds) -> Bounds:
    def equal(a: Length, b: Length) -> Length | None:
        if a == b:
            return ONE
        is_unequal = view.tokens.is_positive(a.minus(b)) or view.tokens.is_positive(b.minus(a))
        return ZERO if is_unequal else None

    return _binary(view, ZERO, ONE, equal)


@_rule("And", "Or", "Xor")
def _logical(view: NodeBounds) -> Bounds:
    return Bounds(ZERO, ONE, broadcast(view.input(0).shape, view.input(1).shape))


@_rule("Not")
def _not(view: NodeBounds) -> Bounds:
    x = view.input(0)
    elements = x.elements and tuple(None if each is None else ONE.minus(each) for each in x.elements)
    return Bounds(ZERO, ONE, x.shape, elements)


@_rule("Where")
def _where(view: NodeBounds) -> Bounds:
    condition, x, y = (view.input(number) for number in range(3))
    shape = broadcast(condition.shape, broadcast(x.shape, y.shape))
    if condition.comparison is not None:
        x, y = _refine(view, condition.comparison, x, y)
    joined = join(x, y)
    return Bounds(joined.low, joined.high, shape, _choose_elements(condition.elements, x.elements, y.elements))


def _choose_elements(condition: Shape | None, x: Shape | None, y: Shape | None) -> Shape | None:
    """Returns the elements of x where the condition is known to be 1, those of y where it is known to be 0."""
    if condition is None or x is None or y is None:
        return None
    size = max(map(len, (condition, x, y)))
    rows = [each * size if len(each) == 1 else each for each in (condition, x, y)]
    if any(len(row) != size for row in rows):
        return None
    return tuple({ONE: a, ZERO: b}.get(is_true) for is_true, a, b in zip(*rows, strict=True))  # type: ignore[arg-type]


def _refine(view: NodeBounds, comparison: Comparison, x: Bounds, y: Bounds) -> tuple[Bounds, Bounds]:
    """Returns the two values of a Where that chooses x where left is below right: x is below it, y not above left."""
    names = view.node.inputs
    strict, loose = (ONE, ZERO) if comparison.strict else (ZERO, ONE)
    left, right = view.bounds_of(comparison.left), view.bounds_of(comparison.right)
    if names[1] == comparison.left and right.high is not None:
        x = x._replace(high=smaller(x.high or right.high, right.high.minus(strict)))
    if names[2] == comparison.right and left.high is not None:
        y = y._replace(high=smaller(y.high or left.high, left.high.minus(loose)))
    return x, y


# Sizes alone


@_rule(
    *("Softmax", "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Dropout", "Gelu", "Tanh"),
    *("Erf", "Sqrt", "Relu", "Sigmoid", "Exp", "Log", "Cos", "Sin", "Reciprocal", "IsNaN", "FastGelu", "Floor", "Ceil"),
    *("com.microsoft.FastGelu", "com.microsoft.Gelu", "com.microsoft.BiasGelu", "com.microsoft.QuickGelu", "Abs"),
    *("mlx.rms_norm", "mlx.rotary", "com.microsoft.RotaryEmbedding", "RotaryEmbedding"),
)
def _same_shape(view: NodeBounds) -> Bounds:
    return Bounds(shape=view.input(0).shape)


@_rule("Pow")
def _broadcast_shape(view: NodeBounds) -> Bounds:
    return Bounds(shape=broadcast(view.input(0).shape, view.input(1).shape))


@_rule("MatMul", "com.microsoft.FusedMatMul")
def _matmul(view: NodeBounds) -> Bounds:
    a, b = view.input(0).shape, view.input(1).shape
    if a is None or b is None or len(a) < 2 or len(b) < 2 or view.node.op_type != "MatMul":
        return UNKNOWN
    batch = broadcast(a[:-2], b[:-2])
    return UNKNOWN if batch is None else Bounds(shape=(*batch, a[-2], b[-1]))


@_rule("mlx.positions")
def _positions(view: NodeBounds) -> Bounds:
    return Bounds(ZERO, ROW.minus(ONE), (None, STEP))


@_rule("mlx.embedding", "mlx.linear")
def _layer(view: NodeBounds) -> Bounds:
    shape = view.input(0).shape
    if shape is None:
        return UNKNOWN
    return Bounds(shape=(*shape, None) if view.node.op_type == "mlx.embedding" else (*shape[:-1], None))
