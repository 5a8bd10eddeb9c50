"""The sum of a linear layer's product and the residual stream becomes an input of the layer's node."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.program import Node


def fuse_residual_add(graph: GraphView) -> Iterator[MatchOutcome]:
    """Add(r, mlx.linear(x, layer)) → mlx.linear(x, layer, r), where r, product and sum have one shape in every size.

    A sum is fused with one product: of two, one that can be summed in one operation, else the first. The node stands
    where the Add stood, since r may be computed after the product.
    """
    probe = graph.shape_probe
    if probe is None:
        return
    for node in graph.nodes:
        if not is_op_type(node, "Add"):
            continue
        terms = zip(node.inputs, reversed(node.inputs), strict=True)
        products = [
            (product, residual)
            for name, residual in terms
            if (product := graph.producer(name, "mlx.linear")) and not _has_residual(product)
        ]
        if not products:
            continue
        own_products = [
            (product, residual)
            for product, residual in products
            if residual not in product.outputs and graph.only_consumer(product.outputs[0]) is node
        ]
        if not own_products:
            yield SkippedMatch(node, "the product is read by another node too; expected one that only the sum reads")
            continue
        product, residual = min(own_products, key=lambda term: not _is_one_operation(graph, term[0]))
        shapes = probe.shapes(node.outputs[0])
        if shapes is None or any(probe.shapes(name) != shapes for name in (*product.outputs, residual)):
            yield SkippedMatch(node, "the product and the residual differ in shape; expected one shape in every size")
            continue
        inputs = (*product.inputs, residual)
        yield Replacement(node, (Node(product.op, inputs, node.outputs, product.attrs, product.name),))


def _has_residual(product: Node) -> bool:
    """Whether the product is fused with a sum already."""
    return len(product.inputs) > 2


def _is_one_operation(graph: GraphView, product: Node) -> bool:
    """Whether the product and its sum are one operation: in floats, and without a bias, which is a sum itself."""
    layer = graph.program.layers[product.inputs[1]]
    return layer["kind"] == "Linear" and not layer.get("bias")
