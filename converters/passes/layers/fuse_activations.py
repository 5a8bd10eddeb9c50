"""Activations that exporters write in several nodes become one node, with the product of a gated MLP after them.

Gelu alone has a dozen spellings. So an activation is not recognized by its nodes: elementwise nodes over one value are
computed on a grid, and the curve is compared with those of the known activations.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import ARITHMETIC_OPS, GELU_AND_SWISH_OPS, NONLINEAR_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.subgraph import evaluate_nodes
from mlx_transmuter.ops.mlx.fused import ACTIVATIONS_BY_NAME
from mlx_transmuter.program import Node

_NONLINEAR_OPS = (*NONLINEAR_OPS, *GELU_AND_SWISH_OPS)
_MAX_NODES = 14
# How far a curve may be from an activation, relative to 1 + its size.
_TOLERANCE, _HALF_TOLERANCE = 2e-6, 4e-4
_SAMPLE_POINTS = np.concatenate([np.linspace(-12, 12, 2001), [-60.0, 60.0]]).astype(np.float32)


def fuse_activations(graph: GraphView) -> Iterator[MatchOutcome]:
    """x · sigmoid(x), the forms of Gelu and the like → mlx.activate; with the product after it → mlx.gate."""
    curves = {kind: ops.to_host(function(mx.array(_SAMPLE_POINTS))) for kind, function in ACTIVATIONS_BY_NAME.items()}
    fused_nodes: set[int] = set()
    for node in reversed(graph.nodes):
        if id(node) in fused_nodes or not is_op_type(node, "Mul", *GELU_AND_SWISH_OPS):
            continue
        cone = _find_cone(graph, node)
        kind = _match_activation(graph, *cone, curves) if cone else None
        if cone is None or kind is None:
            continue
        source, nodes = cone
        fused_nodes.update(map(id, nodes))
        gate = _find_gate(graph, node)
        if gate is not None:
            product, gated = gate
            yield Replacement(product, (Node("mlx.gate", (source, gated), product.outputs, {"kind": kind}, node.name),))
        else:
            yield Replacement(node, (Node("mlx.activate", (source,), node.outputs, {"kind": kind}, node.name),))


def _find_gate(graph: GraphView, activation: Node) -> tuple[Node, str] | None:
    """The product of the activation and a value of the step, if it is all that reads the activation; and the value."""
    product = graph.only_consumer(activation.outputs[0])
    if product is None or not is_op_type(product, "Mul"):
        return None
    factors = [name for name in product.inputs if name != activation.outputs[0]]
    if len(factors) != 1 or graph.constant(factors[0]) is not None or graph.weight(factors[0]) is not None:
        return None
    return product, factors[0]


def _find_cone(graph: GraphView, root: Node) -> tuple[str, list[Node]] | None:
    """The only value that the root depends on through elementwise nodes, one of them nonlinear; and these nodes."""
    nodes = {id(root): root}
    frontier = {name for name in root.inputs if graph.constant(name) is None}
    while len(nodes) <= _MAX_NODES and frontier:
        if len(frontier) == 1 and any(is_op_type(node, *_NONLINEAR_OPS) for node in nodes.values()):
            return frontier.pop(), graph.in_order(nodes.values())
        producers = [producer for name in frontier if (producer := graph.producer(name)) is not None]
        latest = max(producers, key=graph.position, default=None)
        if latest is None or not is_op_type(latest, *_NONLINEAR_OPS, *ARITHMETIC_OPS):
            return None
        nodes[id(latest)] = latest
        frontier -= set(latest.outputs)
        frontier |= {name for name in latest.inputs if graph.constant(name) is None}
    return None


def _match_activation(graph: GraphView, source: str, nodes: list[Node], curves: dict[str, np.ndarray]) -> str | None:
    """The kind of activation that the nodes compute of the source, or None.

    curves: the value of each activation at the sample points.
    """
    constants = {name: value for node in nodes for name in node.inputs if (value := graph.constant(name)) is not None}
    if any(value.size != 1 or value.dtype.kind not in "fV" for value in constants.values()):
        return None
    # Constants of a half type are rounded: the two forms of Gelu then differ by less than the tolerance.
    has_half_constants = any(value.dtype.itemsize == 2 for value in constants.values())
    tolerance = _HALF_TOLERANCE if has_half_constants else _TOLERANCE
    inputs = {name: value.astype(np.float32) for name, value in constants.items()} | {source: _SAMPLE_POINTS}
    try:
        samples = evaluate_nodes(nodes, inputs)[nodes[-1].outputs[0]]
    except ops.OperatorError:
        return None
    errors = {kind: float((np.abs(samples - curve) / (1 + np.abs(curve))).max()) for kind, curve in curves.items()}
    nearest = min(errors, key=errors.__getitem__)
    return nearest if errors[nearest] <= tolerance else None
