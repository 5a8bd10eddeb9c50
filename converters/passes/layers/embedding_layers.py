"""Rows of a weight that are gathered by ids become an `nn.Embedding` layer (weight [rows, dim])."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import name_arrays
from mlx_transmuter.converters.graph.linear_product import strip_transpose
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.program import Node

# What else may read the table: other embeddings, and the head whose weight is tied to it.
_TABLE_READERS = ("Gather", "Transpose", "MatMul")


def make_embedding_layers(graph: GraphView) -> Iterator[MatchOutcome]:
    """Gather(W [rows, dim], ids) on axis 0 → mlx.embedding. A head that multiplies with Wᵀ keeps the same table."""
    for node in graph.nodes:
        if not is_op_type(node, "Gather") or node.attrs.get("axis", 0) != 0:
            continue
        name, is_transposed = strip_transpose(graph, node.inputs[0])  # of the head's matrix, where the two are tied
        table = graph.weight(name)
        if table is None or len(table.shape) != 2 or node.inputs[1] in graph.program.constants:
            continue
        if table.dtype not in LAYER_FLOAT_TYPES:
            yield SkippedMatch(node, f"the table is {table.dtype}; expected a float type")
            continue
        others = [n for n in graph.consumers(name) if not any(is_op_type(n, kind) for kind in _TABLE_READERS)]
        if others:
            yield SkippedMatch(node, f"the table is also read by {others[0].op}")
            continue
        path = layer_path(graph, name)
        yield Replacement(
            node,
            (Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name),),
            layers={path: {"kind": "Embedding"}},
            tensors=name_arrays(path, {"weight": table.transpose() if is_transposed else table}),
        )
