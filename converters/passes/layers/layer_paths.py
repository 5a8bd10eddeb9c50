"""Paths of new layers, by the names of their weights."""

from __future__ import annotations

import re

from mlx_transmuter.converters.graph.graph_view import GraphView


def layer_path(graph: GraphView, weight_name: str, *other_arrays: str) -> str:
    """The path of the layer that takes the weight of that name, and with it the other arrays.

    The path is the scope that the weight stands in. A scope may hold more than its layer does, such as a bias that
    another node adds; the layer then gets a scope of its own.
    """
    path, own = re.sub(r"\.weight(_quantized|_\d+)?$|_quantized$", "", weight_name), (weight_name, *other_arrays)
    path = path if path != weight_name else weight_name.rpartition(".")[0]
    if not path or any(name.startswith(f"{path}.") and name not in own for name in graph.program.tensors):
        path = f"{weight_name.removesuffix('.weight')}.layer"
    return path
