"""Paths of new layers: the scopes of their weights, where nothing else stands in these."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from mlx_transmuter.converters.graph.graph_view import GraphView


def layer_path(graph: GraphView, weight_name: str, *other_arrays: str) -> str:
    """The path of the layer that takes the weight of that name, and with it the other arrays.

    The path is the scope that the weight stands in. A scope may hold more than its layer does, such as a bias that
    another node adds; the layer then gets a scope of its own.
    """
    path = re.sub(r"\.weight(_quantized|_\d+)?$|_quantized$", "", weight_name)
    path = path if path != weight_name else weight_name.rpartition(".")[0]
    if not path or _holds_arrays(path, graph.program.tensors, (weight_name, *other_arrays)):
        path = f"{weight_name.removesuffix('.weight')}.layer"
    return path


def unused_layer_path(path: str, array_names: Collection[str], suffix: str) -> str:
    """The path, followed by the suffix as often as it takes until it is no array's name and no array stands in it."""
    while path in array_names or _holds_arrays(path, array_names):
        path += suffix
    return path


def _holds_arrays(path: str, array_names: Iterable[str], ignored: tuple[str, ...] = ()) -> bool:
    """Whether an array stands in that scope, other than the ignored ones."""
    return any(name.startswith(f"{path}.") and name not in ignored for name in array_names)
