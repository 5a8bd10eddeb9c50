"""Rules of operators that compute with integers: arithmetic, sums, comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable

from mlx_transmuter.program.position_limit.bounds import (
    Bounds,
    Comparison,
    Shape,
    broadcast,
    join,
)
from mlx_transmuter.program.position_limit.lengths import (
    ONE,
    ZERO,
    Length,
    larger,
    product,
    smaller,
    total,
)
from mlx_transmuter.program.position_limit.node_bounds import NodeBounds, declare_rule

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


@declare_rule("Add")
def _add(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    return _binary(view, total(a.low, b.low), total(a.high, b.high), Length.plus)


@declare_rule("Sub")
def _sub(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    low = None if a.low is None or b.high is None else a.low.minus(b.high)
    high = None if a.high is None or b.low is None else a.high.minus(b.low)
    return _binary(view, low, high, Length.minus)


@declare_rule("Neg")
def _neg(view: NodeBounds) -> Bounds:
    x = view.input(0).map(lambda number: number.times(-1))
    return Bounds(x.high, x.low, x.shape, x.elements)


@declare_rule("Mul")
def _mul(view: NodeBounds) -> Bounds:
    a, b = view.input(0), view.input(1)
    low = high = None
    if all(x.low is not None and x.low.is_at_least(ZERO) for x in (a, b)):
        low, high = ZERO, product(a.high, b.high)
    return _binary(view, low, high, product)


@declare_rule("Div")
def _div(view: NodeBounds) -> Bounds:
    a, divisor = view.input(0), view.input(1).as_constant

    def divide(x: Length, y: Length) -> Length | None:
        by = y.as_constant
        return None if not by or any(part % by for part in x) else Length(*(part // by for part in x))

    high = a.high if divisor is not None and divisor > 0 and a.low is not None and a.low.is_at_least(ZERO) else None
    return _binary(view, ZERO if high else None, high, divide)


@declare_rule("Mod")
def _mod(view: NodeBounds) -> Bounds:
    divisor, shape = view.input(1).as_constant, broadcast(view.input(0).shape, view.input(1).shape)
    return Bounds(ZERO, Length(constant=divisor - 1), shape) if divisor and divisor > 0 else Bounds(shape=shape)


@declare_rule("Max", "Min", "Clip")
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


@declare_rule("CumSum")
def _cum_sum(view: NodeBounds) -> Bounds:
    x, axis = view.input(0), view.input(1).as_constant
    size = None if axis is None else x.size(axis)
    return Bounds(_at_least_zero(x), _sum_of(x, size), x.shape)


@declare_rule("ReduceSum")
def _reduce_sum(view: NodeBounds) -> Bounds:
    x, axes = view.input(0), view.integers("axes", 1)
    size = product(*(x.size(axis) for axis in axes)) if axes else None
    return Bounds(_at_least_zero(x), _sum_of(x, size), _reduced_shape(view, axes))


@declare_rule("ReduceMax")
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
    return product(x.high, count) if _at_least_zero(x) is not None else None


# Comparisons


@declare_rule("Greater", "GreaterOrEqual", "Less", "LessOrEqual")
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


@declare_rule("Equal")
def _equal(view: NodeBounds) -> Bounds:
    def equal(a: Length, b: Length) -> Length | None:
        if a == b:
            return ONE
        is_unequal = view.tokens.is_positive(a.minus(b)) or view.tokens.is_positive(b.minus(a))
        return ZERO if is_unequal else None

    return _binary(view, ZERO, ONE, equal)


@declare_rule("And", "Or", "Xor")
def _logical(view: NodeBounds) -> Bounds:
    return Bounds(ZERO, ONE, broadcast(view.input(0).shape, view.input(1).shape))


@declare_rule("Not")
def _not(view: NodeBounds) -> Bounds:
    x = view.input(0)
    elements = x.elements and tuple(None if each is None else ONE.minus(each) for each in x.elements)
    return Bounds(ZERO, ONE, x.shape, elements)


@declare_rule("Where")
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
