"""Patterns: small trees of operators that a value may be the result of, and what they bind.

`Op("Mul", X, Op("Sqrt", Y))` matches a product of something with a root. Add and Mul match in either order; a Var that
stands twice must be the same value both times. `find` gives the names bound, or None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.program import Node

_COMMUTATIVE_OPERATORS = ("Add", "Mul")
Bindings = dict[str, str]


@dataclass(frozen=True)
class Var:
    """Any value; bound under `name`."""

    name: str


@dataclass(frozen=True)
class ConstantVector:
    """A constant tensor, on the host or a weight, of rank 1 or as many axes of size 1 before it; bound under `name`."""

    name: str


@dataclass(frozen=True)
class ConstantScalar:
    """A constant with one element; bound under `name` where it has one, and equal to `value` where it has one."""

    name: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Op:
    """A node of that kind ("Mul", any opset) over inputs that match, the first ones of those it has."""

    op_type: str
    inputs: tuple[Pattern, ...]
    name: str = ""

    def __init__(self, kind: str, *inputs: Pattern, name: str = ""):
        object.__setattr__(self, "op_type", kind)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class AnyOf:
    """The first of the patterns that matches."""

    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: Pattern):
        object.__setattr__(self, "patterns", patterns)


@dataclass(frozen=True)
class OptionalOp:
    """The pattern, or a node of that kind over it."""

    op_type: str
    pattern: Pattern


Pattern = Var | ConstantVector | ConstantScalar | Op | AnyOf | OptionalOp


def match_pattern(graph: GraphView, node: Node, pattern: Pattern) -> Bindings | None:
    """What the pattern binds where `node` is its root, or None where it doesn't match."""
    return next(_match_value(graph, node.outputs[0], pattern, {}), None)


def _match_value(graph: GraphView, value: str, pattern: Pattern, bound: Bindings) -> Iterator[Bindings]:
    match pattern:
        case Var(name):
            if bound.get(name, value) == value:
                yield bound | {name: value}
        case ConstantVector(name):
            if bound.get(name, value) == value and _is_constant_vector(graph, value):
                yield bound | {name: value}
        case ConstantScalar(name, wanted):
            constant = graph.constant(value)
            if (
                constant is not None
                and constant.size == 1
                and (wanted is None or np.isclose(float(constant.item()), wanted))
            ):
                yield bound | ({name: value} if name else {})
        case AnyOf(patterns):
            for one in patterns:
                yield from _match_value(graph, value, one, bound)
        case OptionalOp(kind, inner):
            yield from _match_value(graph, value, inner, bound)
            node = graph.producer(value, kind)
            if node is not None:
                yield from _match_value(graph, node.inputs[0], inner, bound)
        case Op(kind, inputs, name):
            node = graph.producer(value)
            if node is None or not is_op_type(node, kind) or len(node.inputs) < len(inputs):
                return
            bound = bound | ({name: value} if name else {})
            orders = [node.inputs]
            if kind in _COMMUTATIVE_OPERATORS and len(inputs) == 2:
                orders.append(node.inputs[::-1])
            for order in orders:
                yield from _match_inputs(graph, order, inputs, bound)


def _match_inputs(
    graph: GraphView, values: tuple[str, ...], patterns: tuple[Pattern, ...], bound: Bindings
) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for found in _match_value(graph, values[0], patterns[0], bound):
        yield from _match_inputs(graph, values[1:], patterns[1:], found)


def _is_constant_vector(graph: GraphView, value: str) -> bool:
    tensor = graph.weight(value)
    constant = graph.constant(value)
    shape = tensor.shape if tensor is not None else constant.shape if constant is not None else None
    return shape is not None and len(shape) >= 1 and all(size == 1 for size in shape[:-1]) and shape[-1] > 1
