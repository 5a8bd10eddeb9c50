"""Reshapes that flatten rows before a linear layer, and restore them after it, are dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node

_Shapes = list[tuple[int, ...]]  # of one value, in each step of the shape probe


def drop_row_reshapes(graph: GraphView) -> Iterator[MatchOutcome]:
    """Reshape(mlx.linear(Reshape(x))) → mlx.linear(x), where the shapes say that rows stay rows. As GPT-2's Conv1D.

    Where the first Reshape also merges the last axes of x, as heads and their size, a Reshape of these remains.
    """
    probe = graph.shape_probe
    if probe is None:
        return
    for node in graph.nodes:
        product = graph.producer(node.inputs[0], "mlx.linear") if is_op_type(node, "Reshape") else None
        if product is None or graph.only_consumer(product.outputs[0]) is not node:
            continue
        flatten = graph.producer(product.inputs[0], "Reshape")
        if flatten is None:
            continue
        x, rows = flatten.inputs[0], flatten.outputs[0]
        x_shapes, row_shapes = probe.shapes(x), probe.shapes(rows)
        product_shapes, shapes = probe.shapes(product.outputs[0]), probe.shapes(node.outputs[0])
        if x_shapes is None or row_shapes is None or product_shapes is None or shapes is None:
            continue
        if any(shape[-1] != product[-1] for shape, product in zip(shapes, product_shapes, strict=True)):
            continue
        source, nodes, constants = x, [], {}
        if not _has_rows_of(x_shapes, shapes, row_shapes):
            leading_axes, size = len(shapes[0]) - 1, row_shapes[0][-1]
            if not _has_split_rows_of(x_shapes, shapes, size):
                continue
            source, source_shape = f"{rows}.merged", f"{rows}.merged.shape"
            constants[source_shape] = np.array([*[0] * leading_axes, size], np.int64)
            nodes.append(Node("Reshape-5", (x, source_shape), (source,), {}, flatten.name))
        nodes.append(Node(product.op, (source, *product.inputs[1:]), node.outputs, product.attrs, product.name))
        yield Replacement(node, tuple(nodes), constants=constants)


def _has_rows_of(x_shapes: _Shapes, shapes: _Shapes, row_shapes: _Shapes) -> bool:
    """Whether x has the leading axes of the result, and the last axis of the rows."""
    return all(
        x[:-1] == shape[:-1] and x[-1] == row[-1] for x, shape, row in zip(x_shapes, shapes, row_shapes, strict=True)
    )


def _has_split_rows_of(x_shapes: _Shapes, shapes: _Shapes, row_size: int) -> bool:
    """Whether x has the leading axes of the result, and after them several axes of as many elements as a row."""
    return all(
        x[: len(shape) - 1] == shape[:-1] and math.prod(x[len(shape) - 1 :]) == row_size
        for x, shape in zip(x_shapes, shapes, strict=True)
    )
