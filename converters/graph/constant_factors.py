"""Constant factors: a value without the constants that it is multiplied or divided by."""

from __future__ import annotations

from mlx_transmuter.converters.graph.graph_view import GraphView


def strip_constant_factor(graph: GraphView, value: str) -> tuple[str, float]:
    """Returns the value without the constant that its own node multiplies or divides it by, and that factor."""
    node = graph.producer(value, "Mul", "Div")
    if node is None:
        return value, 1.0
    constants = [graph.scalar(name) for name in node.inputs]
    at = next((i for i, constant in enumerate(constants) if constant is not None), None)
    if at is None or (node.op_type == "Div" and at == 0):
        return value, 1.0
    factor = float(constants[at])  # type: ignore[arg-type]
    return node.inputs[1 - at], 1 / factor if node.op_type == "Div" else factor


def strip_constant_factors(graph: GraphView, value: str) -> tuple[str, float]:
    """Returns the value without the constants of all nodes that multiply or divide it, and their product."""
    product = 1.0
    while (inner := strip_constant_factor(graph, value))[0] != value:
        value, product = inner[0], product * inner[1]
    return value, product
