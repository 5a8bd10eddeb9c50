"""Gates: activations that exporters write in several nodes become one.

Gelu alone has a dozen spellings. So an activation isn't recognised by its nodes: a small cone of elementwise nodes over
one value is computed on a grid, and what it gives is compared with the activations that there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.ops.mlx.fused import ACTIVATIONS_BY_NAME
from mlx_transmuter.program import Node
from mlx_transmuter.runtime.module import evaluate_node

# What makes an activation: a curve in several nodes, or all of it in one.
_ACTIVATION_OPS = ("Gelu", "Swish", "com.microsoft.Gelu", "com.microsoft.FastGelu", "com.microsoft.QuickGelu")
_NONLINEAR_OPS = ("Sigmoid", "Tanh", "Erf", *_ACTIVATION_OPS)
_ELEMENTWISE_OPS = (*_NONLINEAR_OPS, "Mul", "Add", "Sub", "Div", "Pow", "Sqrt", "Neg")
_MAX_NODES = 14
# How far a curve may be from an activation, relative to 1 + its size.
_TOLERANCE, _HALF_TOLERANCE = 2e-6, 4e-4
_SAMPLE_POINTS = np.concatenate([np.linspace(-12, 12, 2001), [-60.0, 60.0]]).astype(np.float32)


def fuse_activations(graph: GraphView) -> Iterator[MatchOutcome]:
    """x · sigmoid(x), the forms of Gelu and the like → mlx.activate; with the product after it → mlx.gate."""
    wanted = {kind: ops.to_host(function(mx.array(_SAMPLE_POINTS))) for kind, function in ACTIVATIONS_BY_NAME.items()}
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    taken: set[int] = set()
    for node in reversed(graph.nodes):
        if id(node) in taken or not is_op_type(node, "Mul", *_ACTIVATION_OPS):
            continue
        cone = _find_cone(graph, node, order)
        kind = _match_activation(graph, *cone, wanted) if cone else None
        if cone is None or kind is None:
            continue
        source, nodes = cone
        taken.update(id(one) for one in nodes)
        after = graph.only_consumer(node.outputs[0])
        others = (
            [name for name in after.inputs if name != node.outputs[0]] if after and is_op_type(after, "Mul") else []
        )
        if after and len(others) == 1 and graph.constant(others[0]) is None and graph.weight(others[0]) is None:
            yield Replacement(after, (Node("mlx.gate", (source, others[0]), after.outputs, {"kind": kind}, node.name),))
        else:
            yield Replacement(node, (Node("mlx.activate", (source,), node.outputs, {"kind": kind}, node.name),))


def _find_cone(graph: GraphView, root: Node, order: dict[int, int]) -> tuple[str, list[Node]] | None:
    """The value that the root depends on alone by elementwise nodes, a curve among them, and these nodes in their
    order.
    """
    nodes = {id(root): root}
    frontier = {name for name in root.inputs if graph.constant(name) is None}
    while len(nodes) <= _MAX_NODES and frontier:
        curved = any(is_op_type(node, kind) for node in nodes.values() for kind in _NONLINEAR_OPS)
        if len(frontier) == 1 and curved:
            return frontier.pop(), sorted(nodes.values(), key=lambda node: order[id(node)])
        makers = [maker for name in frontier if (maker := graph.producer(name)) is not None]
        latest = max(makers, key=lambda node: order[id(node)], default=None)
        if latest is None or not is_op_type(latest, *_ELEMENTWISE_OPS):
            return None
        nodes[id(latest)] = latest
        frontier -= set(latest.outputs)
        frontier |= {name for name in latest.inputs if graph.constant(name) is None}
    return None


def _match_activation(
    graph: GraphView, source: str, nodes: list[Node], activation_values: dict[str, np.ndarray]
) -> str | None:
    """The activation that the nodes compute of the source, or None."""
    constants = {name: value for node in nodes for name in node.inputs if (value := graph.constant(name)) is not None}
    if any(value.size != 1 or value.dtype.kind not in "fV" for value in constants.values()):
        return None
    # Constants of a half type are rounded ones: the two forms of Gelu then differ less than the tolerance is wide.
    half = any(value.dtype.itemsize == 2 for value in constants.values())
    values = {name: value.astype(np.float32) for name, value in constants.items()} | {source: _SAMPLE_POINTS}
    try:
        for node in nodes:
            values |= dict(zip(node.outputs, evaluate_node(node, values), strict=False))
    except ops.OperatorError:
        return None
    found, limit = values[nodes[-1].outputs[0]], _HALF_TOLERANCE if half else _TOLERANCE
    far = {
        kind: float((np.abs(found - curve) / (1 + np.abs(curve))).max()) for kind, curve in activation_values.items()
    }
    nearest = min(far, key=lambda kind: far[kind])
    return nearest if far[nearest] <= limit else None
