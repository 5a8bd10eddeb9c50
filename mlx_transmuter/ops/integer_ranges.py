"""Rules for the ranges of integers: in which range the outputs of an operator are, given those of its inputs.

They follow the indices of a decoder from what a step feeds (token ids, positions, masks) to the tables that they
index, so that no step clips what is in range anyway. An operator without a rule says nothing of its outputs. Integers
are taken as exact; a range that the output's type does not hold is dropped, for there they may wrap around.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.indices import IntegerRange, range_of_array


class NodeCall(NamedTuple):
    """One call of an operator: the ranges of its inputs by number (None: nothing is known, or no integers), its
    arguments, its attributes and its results.
    """

    ranges: Sequence[IntegerRange | None]
    arguments: Sequence[Any]
    attributes: Mapping[str, Any]
    results: Sequence[Any]


RangeRule = Callable[[NodeCall], Sequence[IntegerRange | None]]


def ranges_of_results(rule: RangeRule | None, call: NodeCall) -> list[IntegerRange | None]:
    """Returns the range of each result of a call; of a numpy array there is none to tell, for its values are known."""
    ruled = [*rule(call)] if rule is not None else []
    ruled += [None] * (len(call.results) - len(ruled))
    return [
        _range_in_type(known, result) if isinstance(result, mx.array) else None
        for known, result in zip(ruled, call.results, strict=False)
    ]


def _range_in_type(known: IntegerRange | None, array: mx.array) -> IntegerRange | None:
    if known is None or not mx.issubdtype(array.dtype, mx.integer):
        return range_of_array(array)
    limits = mx.iinfo(array.dtype)
    return known if known.is_within(limits.min, limits.max) else range_of_array(array)


def range_of_input(number: int) -> RangeRule:
    """Returns the rule of outputs that hold nothing but elements of one input."""

    def rule(call: NodeCall) -> Sequence[IntegerRange | None]:
        known = call.ranges[number] if number < len(call.ranges) else None
        return [known] * len(call.results)

    return rule


def range_of_inputs(first: int = 0, last: int | None = None) -> RangeRule:
    """Returns the rule of an output that holds elements of the inputs from `first` to before `last`."""

    def rule(call: NodeCall) -> Sequence[IntegerRange | None]:
        known = call.ranges[first:last]
        if not known or any(one is None for one in known):
            return [None]
        return [IntegerRange(min(one.low for one in known if one), max(one.high for one in known if one))]

    return rule


same_range = range_of_input(0)


def _elementwise(combine: Callable[[IntegerRange, IntegerRange], IntegerRange]) -> RangeRule:
    """Returns the rule of an operator that combines its inputs element by element, two at a time."""

    def rule(call: NodeCall) -> Sequence[IntegerRange | None]:
        total = call.ranges[0]
        for one in call.ranges[1:]:
            if total is None or one is None:
                return [None]
            total = combine(total, one)
        return [total]

    return rule


def _product(a: IntegerRange, b: IntegerRange) -> IntegerRange:
    products = [x * y for x in a for y in b]
    return IntegerRange(min(products), max(products))


range_of_sum = _elementwise(lambda a, b: IntegerRange(a.low + b.low, a.high + b.high))
range_of_difference = _elementwise(lambda a, b: IntegerRange(a.low - b.high, a.high - b.low))
range_of_product = _elementwise(_product)


def _range_of_extremum(*choices: Callable[[int, int], int]) -> RangeRule:
    """Returns the rule of an operator that takes the smaller or the larger of its first input and each further one, by
    `choices`, the last one for all that follow. An input that is unknown still bounds nothing more than its type does.
    """

    def rule(call: NodeCall) -> Sequence[IntegerRange | None]:
        if not mx.issubdtype(call.results[0].dtype, mx.integer):
            return [None]
        limits = mx.iinfo(call.results[0].dtype)
        every = IntegerRange(limits.min, limits.max)
        total = call.ranges[0] or every
        for number, known in enumerate(call.ranges[1:]):
            if call.arguments[number + 1] is not None:
                choose, bound = choices[min(number, len(choices) - 1)], known or every
                total = IntegerRange(choose(total.low, bound.low), choose(total.high, bound.high))
        return [total]

    return rule


range_of_minimum = _range_of_extremum(min)
range_of_maximum = _range_of_extremum(max)
range_of_clip = _range_of_extremum(max, min)


def range_of_remainder(call: NodeCall) -> Sequence[IntegerRange | None]:
    """The rule of a remainder with the divisor's sign; of one with the dividend's nothing is said."""
    divisor = call.ranges[1]
    if divisor is None or divisor.low <= 0 or call.attributes.get("fmod"):
        return [None]
    return [IntegerRange(0, divisor.high - 1)]


def range_of_elements_sum(call: NodeCall) -> Sequence[IntegerRange | None]:
    """The rule of sums over elements of the first input: of as many as there are for each result, or along an axis."""
    known, x, result = call.ranges[0], call.arguments[0], call.results[0]
    if known is None:
        return [None]
    # A running sum has as many results as elements, each the sum of at most those along its axis.
    count = x.size // max(result.size, 1) if result.size < x.size else max(x.shape, default=1)
    return [IntegerRange(min(known.low * count, known.low, 0), max(known.high * count, known.high, 0))]


def range_of_axis(output: int) -> RangeRule:
    """Returns the rule of an operator whose output of that number has indices into `axis` of its first input."""

    def rule(call: NodeCall) -> Sequence[IntegerRange | None]:
        x, axis = call.arguments[0], call.attributes.get("axis", 0 if output == 0 else -1)
        return [*[None] * output, IntegerRange(0, max(x.shape[axis] - 1, 0))]

    return rule
