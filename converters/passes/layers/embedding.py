"""Embedding: rows of a weight, taken by ids, become an `nn.Embedding`."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES
from mlx_transmuter.converters.passes.layers.linear import layer_names
from mlx_transmuter.program import Node


def make_embedding_layers(graph: GraphView) -> Iterator[MatchOutcome]:
    """Gather(W [rows, dim], ids) on axis 0 → mlx.embedding. A head that multiplies with Wᵀ keeps the same table."""
    for node in graph.nodes:
        if not is_op_type(node, "Gather") or node.attrs.get("axis", 0) != 0:
            continue
        name, table = node.inputs[0], graph.weight(node.inputs[0])
        turned = graph.producer(name, "Transpose")
        if turned is not None and list(turned.attrs.get("perm", [1, 0])) == [
            1,
            0,
        ]:  # the head's matrix serves as the table
            name, matrix = turned.inputs[0], graph.weight(turned.inputs[0])
            table = matrix.transpose() if matrix is not None else None
        if table is None or len(table.shape) != 2 or node.inputs[1] in graph.program.constants:
            continue
        if table.dtype not in LAYER_FLOAT_TYPES:
            yield SkippedMatch(node, f"the table is {table.dtype}; wanted a float type")
            continue
        others = [n for n in graph.consumers(name) if not is_op_type(n, "Gather", "Transpose", "MatMul")]
        if others:
            yield SkippedMatch(node, f"the table is also read by {others[0].op}")
            continue
        path, weight, _ = layer_names(graph, name)
        yield Replacement(
            node,
            (Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name),),
            layers={path: {"kind": "Embedding"}},
            arrays={weight: table},
        )
