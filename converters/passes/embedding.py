"""Embedding: rows of a weight, taken by ids, become an `nn.Embedding`."""

from __future__ import annotations

from collections.abc import Iterator

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.passes.linear import layer_names
from converters.tensors import FLOATS
from mlx_transmuter.program import Node


def embedding(graph: Graph) -> Iterator[Answer]:
    """Gather(W [rows, dim], ids) on axis 0 → mlx.embedding. A head that multiplies with Wᵀ keeps the same table."""
    for node in graph.nodes:
        if not is_kind(node, "Gather") or node.attrs.get("axis", 0) != 0:
            continue
        name, table = node.inputs[0], graph.weight(node.inputs[0])
        turned = graph.producer(name, "Transpose")
        if turned is not None and list(turned.attrs.get("perm", [1, 0])) == [
            1,
            0,
        ]:  # the head's matrix serves as the table
            name, matrix = turned.inputs[0], graph.weight(turned.inputs[0])
            table = matrix.transposed() if matrix is not None else None
        if table is None or len(table.shape) != 2 or node.inputs[1] in graph.program.constants:
            continue
        if table.dtype not in FLOATS:
            yield Declined(node, f"the table is {table.dtype}; wanted a float type")
            continue
        others = [
            n for n in graph.consumers(name) if not any(is_kind(n, kind) for kind in ("Gather", "Transpose", "MatMul"))
        ]
        if others:
            yield Declined(node, f"the table is also read by {others[0].op}")
            continue
        path, weight, _ = layer_names(graph, name)
        yield Become(
            node,
            (Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name),),
            layers={path: {"kind": "Embedding"}},
            arrays={weight: table},
        )
