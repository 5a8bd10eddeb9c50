"""Residual: the sum of a product and the stream that it belongs to becomes a part of the product."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.program import Node


def fuse_residual_add(graph: GraphView) -> Iterator[MatchOutcome]:
    """Add(r, mlx.linear(x, layer)) → mlx.linear(x, layer, r), where r, product and sum have one shape in every size.

    A sum takes one product in: of two, one that can be summed in one operation, else the first. The node stands where
    the Add stood, since r may come after the product.
    """
    seen = graph.shape_probe
    if seen is None:
        return
    for node in graph.nodes:
        if not is_op_type(node, "Add"):
            continue
        terms = zip(node.inputs, reversed(node.inputs), strict=True)
        products = [
            (one, to) for name, to in terms if (one := graph.producer(name, "mlx.linear")) and not _has_residual(one)
        ]
        if not products:
            continue
        alone = [(one, to) for one, to in products if to not in one.outputs and _only_reader(graph, one) is node]
        if not alone:
            yield SkippedMatch(node, "the product is read by something else too; wanted one that only the sum reads")
            continue
        product, to = min(alone, key=lambda term: not _is_one_operation(graph, term[0]))
        wanted, *others = (seen.shapes(name) for name in (node.outputs[0], *product.outputs, to))
        if wanted is None or any(shapes != wanted for shapes in others):
            yield SkippedMatch(
                node, "the product and what it is added to differ in shape; wanted one shape in every size"
            )
            continue
        inputs = (*product.inputs, to)
        yield Replacement(node, (Node(product.op, inputs, node.outputs, product.attrs, product.name),))


def _has_residual(product: Node) -> bool:
    """Whether the product is a part of a sum already."""
    return len(product.inputs) > 2


def _only_reader(graph: GraphView, product: Node) -> Node | None:
    return graph.only_consumer(product.outputs[0])


def _is_one_operation(graph: GraphView, product: Node) -> bool:
    """Whether the product and its sum are one operation: in floats, and without a bias, which is a sum itself."""
    layer = graph.program.layers[product.inputs[1]]
    return layer["kind"] == "Linear" and not layer.get("bias")
