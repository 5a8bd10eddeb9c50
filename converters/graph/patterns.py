"""Patterns: small trees of operators that may have computed a value, and the values that they bind to names.

`Op("Mul", Var("x"), Op("Sqrt", Var("y")))` matches a product of something with a root. Operands of Add and Mul match in
either order; a Var that stands twice must be the same value both times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.program import Node

_COMMUTATIVE_OPERATORS = ("Add", "Mul")
Bindings = dict[str, str]


class Pattern(ABC):
    """What a value may be."""

    @abstractmethod
    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        """Yields the bindings, with those of this pattern added, for each way in which the value matches them."""


@dataclass(frozen=True)
class Var(Pattern):
    """Any value; bound to `name`."""

    name: str

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        if bindings.get(self.name, value) == value:
            yield bindings | {self.name: value}


@dataclass(frozen=True)
class ConstantVector(Pattern):
    """A constant or a weight [n] or [1, …, 1, n] with n > 1; bound to `name`."""

    name: str

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        array = graph.weight(value) or graph.constant(value)
        if array is None or bindings.get(self.name, value) != value:
            return
        *others, size = array.shape or (1,)
        if size > 1 and set(others) <= {1}:
            yield bindings | {self.name: value}


@dataclass(frozen=True)
class ConstantScalar(Pattern):
    """A constant of one element, equal to `value` where that is a number; bound to `name` where that is not ""."""

    name: str = ""
    value: float | None = None

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        number = graph.scalar(value)
        if number is not None and (self.value is None or np.isclose(float(number), self.value)):
            yield bindings | ({self.name: value} if self.name else {})


@dataclass(frozen=True)
class Op(Pattern):
    """The output of a node of the operator ("Mul", any version) whose first inputs match; bound to `name` unless ""."""

    op_type: str
    inputs: tuple[Pattern, ...]
    name: str = ""

    def __init__(self, op_type: str, *inputs: Pattern, name: str = ""):
        object.__setattr__(self, "op_type", op_type)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "name", name)

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        node = graph.producer(value, self.op_type)
        if node is None or len(node.inputs) < len(self.inputs):
            return
        bindings = bindings | ({self.name: value} if self.name else {})
        orders = [node.inputs]
        if self.op_type in _COMMUTATIVE_OPERATORS and len(self.inputs) == 2:
            orders.append(node.inputs[::-1])
        for values in orders:
            yield from _match_all(graph, values, self.inputs, bindings)


@dataclass(frozen=True)
class AnyOf(Pattern):
    """A value that matches one of the patterns, the first of them tried first."""

    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: Pattern):
        object.__setattr__(self, "patterns", patterns)

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        for pattern in self.patterns:
            yield from pattern.match(graph, value, bindings)


@dataclass(frozen=True)
class OptionalOp(Pattern):
    """A value that matches the pattern, or the output of a node of the operator whose first input does."""

    op_type: str
    pattern: Pattern

    def match(self, graph: GraphView, value: str, bindings: Bindings) -> Iterator[Bindings]:
        yield from self.pattern.match(graph, value, bindings)
        node = graph.producer(value, self.op_type)
        if node is not None:
            yield from self.pattern.match(graph, node.inputs[0], bindings)


def match_pattern(graph: GraphView, node: Node, pattern: Pattern) -> Bindings | None:
    """Returns name -> value of the first match with `node` as the pattern's root, or None where there is none."""
    return next(pattern.match(graph, node.outputs[0], {}), None)


def _match_all(
    graph: GraphView, values: tuple[str, ...], patterns: tuple[Pattern, ...], bindings: Bindings
) -> Iterator[Bindings]:
    """Yields the bindings for each way in which each value matches its pattern; values without a pattern are free."""
    if not patterns:
        yield bindings
        return
    for extended in patterns[0].match(graph, values[0], bindings):
        yield from _match_all(graph, values[1:], patterns[1:], extended)
