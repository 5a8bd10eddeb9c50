"""Flat: a product whose rows were laid flat before it and given their shape back after it takes them as they are."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Graph, is_kind
from mlx_transmuter.program import Node


def flat(graph: Graph) -> Iterator[Answer]:
    """Reshape(mlx.linear(Reshape(x))) → mlx.linear(x), where the shapes say that rows stay rows. As GPT-2's Conv1D."""
    seen = graph.observation
    if seen is None:
        return
    for node in graph.nodes:
        product = graph.producer(node.inputs[0], "mlx.linear") if is_kind(node, "Reshape") else None
        if product is None or graph.only_consumer(product.outputs[0]) is not node:
            continue
        rows = graph.producer(product.inputs[0], "Reshape")
        if rows is None:
            continue
        x = rows.inputs[0]
        before, inner, outer, after = (
            seen.shapes(name) for name in (x, rows.outputs[0], product.outputs[0], node.outputs[0])
        )
        if before is None or inner is None or outer is None or after is None:
            continue
        if all(
            b[-1] == i[-1] and a[-1] == o[-1] and a[:-1] == b[:-1]
            for b, i, o, a in zip(before, inner, outer, after, strict=True)
        ):
            yield Become(node, (Node(product.op, (x, *product.inputs[1:]), node.outputs, product.attrs, product.name),))
