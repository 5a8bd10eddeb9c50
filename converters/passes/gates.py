"""Gates: activations that exporters write in several nodes become one.

Gelu alone has a dozen spellings. So an activation isn't recognised by its nodes: a small cone of elementwise nodes over
one value is computed on a grid, and what it gives is compared with the activations that there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from converters.match import Answer, Become, Graph, is_kind
from mlx_transmuter import ops
from mlx_transmuter.module import evaluate
from mlx_transmuter.ops.fused import ACTIVATIONS
from mlx_transmuter.program import Node

# What makes an activation: a curve in several nodes, or all of it in one.
_WHOLE = ("Gelu", "Swish", "com.microsoft.Gelu", "com.microsoft.FastGelu", "com.microsoft.QuickGelu")
_CURVES = ("Sigmoid", "Tanh", "Erf", *_WHOLE)
_ELEMENTWISE = (*_CURVES, "Mul", "Add", "Sub", "Div", "Pow", "Sqrt", "Neg")
_MOST = 14
# How far a curve may be from an activation, relative to 1 + its size.
_EXACT, _HALF = 2e-6, 4e-4
_GRID = np.concatenate([np.linspace(-12, 12, 2001), [-60.0, 60.0]]).astype(np.float32)


def gates(graph: Graph) -> Iterator[Answer]:
    """x · sigmoid(x), the forms of Gelu and the like → mlx.activate; with the product after it → mlx.gate."""
    wanted = {kind: ops.to_host(function(mx.array(_GRID))) for kind, function in ACTIVATIONS.items()}
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    taken: set[int] = set()
    for node in reversed(graph.nodes):
        if id(node) in taken or not any(is_kind(node, kind) for kind in ("Mul", *_WHOLE)):
            continue
        cone = _cone(graph, node, order)
        kind = _kind(graph, *cone, wanted) if cone else None
        if cone is None or kind is None:
            continue
        source, nodes = cone
        taken.update(id(one) for one in nodes)
        after = graph.only_consumer(node.outputs[0])
        others = [name for name in after.inputs if name != node.outputs[0]] if after and is_kind(after, "Mul") else []
        if after and len(others) == 1 and graph.constant(others[0]) is None and graph.weight(others[0]) is None:
            yield Become(after, (Node("mlx.gate", (source, others[0]), after.outputs, {"kind": kind}, node.name),))
        else:
            yield Become(node, (Node("mlx.activate", (source,), node.outputs, {"kind": kind}, node.name),))


def _cone(graph: Graph, root: Node, order: dict[int, int]) -> tuple[str, list[Node]] | None:
    """The value that the root depends on alone by elementwise nodes, a curve among them, and these nodes in their
    order.
    """
    nodes = {id(root): root}
    frontier = {name for name in root.inputs if graph.constant(name) is None}
    while len(nodes) <= _MOST and frontier:
        curved = any(is_kind(node, kind) for node in nodes.values() for kind in _CURVES)
        if len(frontier) == 1 and curved:
            return frontier.pop(), sorted(nodes.values(), key=lambda node: order[id(node)])
        makers = [maker for name in frontier if (maker := graph.producer(name)) is not None]
        latest = max(makers, key=lambda node: order[id(node)], default=None)
        if latest is None or not any(is_kind(latest, kind) for kind in _ELEMENTWISE):
            return None
        nodes[id(latest)] = latest
        frontier -= set(latest.outputs)
        frontier |= {name for name in latest.inputs if graph.constant(name) is None}
    return None


def _kind(graph: Graph, source: str, nodes: list[Node], wanted: dict[str, np.ndarray]) -> str | None:
    """The activation that the nodes compute of the source, or None."""
    constants = {name: value for node in nodes for name in node.inputs if (value := graph.constant(name)) is not None}
    if any(value.size != 1 or value.dtype.kind not in "fV" for value in constants.values()):
        return None
    # Constants of a half type are rounded ones: the two forms of Gelu then differ less than the tolerance is wide.
    half = any(value.dtype.itemsize == 2 for value in constants.values())
    values = {name: value.astype(np.float32) for name, value in constants.items()} | {source: _GRID}
    try:
        for node in nodes:
            values |= dict(zip(node.outputs, evaluate(node, values), strict=False))
    except ops.OperatorError:
        return None
    found, limit = values[nodes[-1].outputs[0]], _HALF if half else _EXACT
    far = {kind: float((np.abs(found - curve) / (1 + np.abs(curve))).max()) for kind, curve in wanted.items()}
    nearest = min(far, key=lambda kind: far[kind])
    return nearest if far[nearest] <= limit else None
