"""Flat: a product whose rows were laid flat before it and given their shape back after it takes them as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node


def drop_row_reshapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Reshape(mlx.linear(Reshape(x))) → mlx.linear(x), where the shapes say that rows stay rows. As GPT-2's Conv1D.

    Where the first Reshape also joins the last axes of x, as those of heads and their size, that is what is left of it.
    """
    seen = graph.shape_probe
    if seen is None:
        return
    for node in graph.nodes:
        product = graph.producer(node.inputs[0], "mlx.linear") if is_op_type(node, "Reshape") else None
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
        if not all(a[-1] == o[-1] for o, a in zip(outer, after, strict=True)):
            continue
        source, nodes, constants = x, [], {}
        if not all(b[-1] == i[-1] and a[:-1] == b[:-1] for b, i, a in zip(before, inner, after, strict=True)):
            lead, size = len(after[0]) - 1, inner[0][-1]
            if not all(b[:lead] == a[:-1] and math.prod(b[lead:]) == size for b, a in zip(before, after, strict=True)):
                continue
            source, shape = f"{rows.outputs[0]}.joined", f"{rows.outputs[0]}.joined.shape"
            constants[shape] = np.array([*[0] * lead, size], np.int64)
            nodes.append(Node("Reshape-5", (x, shape), (source,), {}, rows.name))
        nodes.append(Node(product.op, (source, *product.inputs[1:]), node.outputs, product.attrs, product.name))
        yield Replacement(node, tuple(nodes), constants=constants)
