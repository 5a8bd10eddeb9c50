"""Gates: activations that exporters write in several nodes become one."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Graph, is_kind
from converters.patterns import Op, Scalar, Var, find
from mlx_transmuter.program import Node

_X = Var("x")
_SILU = Op("Mul", _X, Op("Sigmoid", _X))
SILU_GATE = Op("Mul", _SILU, Var("up"))
_CUBE = Op("Mul", Scalar(value=0.044715), Op("Pow", _X, Scalar(value=3.0)))
_INNER = Op("Mul", Op("Add", _X, _CUBE), Scalar(value=0.7978845608028654))
GELU_TANH = Op("Mul", Op("Mul", _X, Scalar(value=0.5)), Op("Add", Op("Tanh", _INNER), Scalar(value=1.0)))
_ERF = Op("Add", Op("Erf", Op("Div", _X, Scalar(value=1.4142135623730951))), Scalar(value=1.0))
GELU = (Op("Mul", Op("Mul", _X, _ERF), Scalar(value=0.5)), Op("Mul", Op("Mul", _X, Scalar(value=0.5)), _ERF))


def gates(graph: Graph) -> Iterator[Answer]:
    """x · sigmoid(x) [· up] → mlx.silu or mlx.silu_gate; the spellings of Gelu → Gelu. Hendrycks & Gimpel 2016."""
    for node in graph.nodes:
        if not is_kind(node, "Mul"):
            continue
        if (found := find(graph, node, SILU_GATE)) is not None:
            yield Become(node, (Node("mlx.silu_gate", (found["x"], found["up"]), node.outputs, name=node.name),))
        elif (found := find(graph, node, _SILU)) is not None:
            yield Become(node, (Node("mlx.silu", (found["x"],), node.outputs, name=node.name),))
        elif (found := find(graph, node, GELU_TANH)) is not None:
            yield Become(node, (Node("Gelu-20", (found["x"],), node.outputs, {"approximate": "tanh"}, node.name),))
        elif (found := next((f for p in GELU if (f := find(graph, node, p)) is not None), None)) is not None:
            yield Become(node, (Node("Gelu-20", (found["x"],), node.outputs, name=node.name),))
