"""Joined: products of one input become one product, as of queries, keys and values, or of a gate and what it gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from converters.match import Answer, Become, Graph
from converters.tensors import Tensor, below
from mlx_transmuter.program import Node

# The axis of a layer's outputs in all that it holds.
_OUTPUTS = {"mlx.linear": 0, "mlx.switch_linear": 1}


def joined(graph: Graph) -> Iterator[Answer]:
    """mlx.linear(x, a), mlx.linear(x, b), … of one scope and one kind of layer → mlx.linear(x, ab) and a Split; so for
    mlx.switch_linear, of which the matrices of each expert stand below one another.

    The matrices stand below one another, so each output is what it was, and a short x costs one pass in place of
    several.
    """
    groups: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if node.op not in _OUTPUTS:
            continue
        path = node.inputs[1]
        layer = graph.program.layers[path]
        types = tuple((part, array.dtype) for part, array in _arrays(graph, path).items())
        others = (node.op, node.inputs[0], *node.inputs[2:])
        scope = _scope(path)[0] if node.op == "mlx.linear" else ""  # rows for experts are read by one mixture alone
        key = (others, scope, tuple(sorted(layer.items())), tuple(node.attrs.items()), types)
        groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        paths = [node.inputs[1] for node in nodes]
        if len(nodes) > 1 and all(len(graph.consumers(path)) == 1 for path in paths):
            yield _one(graph, nodes, paths)
            yield from (Become(node, ()) for node in nodes[1:])


def _one(graph: Graph, nodes: Sequence[Node], paths: Sequence[str]) -> Become:
    first, path = nodes[0], _name(graph, paths)
    parts = [_arrays(graph, one) for one in paths]
    axis = _OUTPUTS[first.op]
    arrays = {f"{path}.{part}": below([one[part] for one in parts], axis) for part in parts[0]}
    sizes = np.array([one["weight"].shape[axis] for one in parts], np.int64)
    whole, split = f"{first.outputs[0]}.joined", f"{path}.split"
    outputs = tuple(node.outputs[0] for node in nodes)
    made = (
        Node(first.op, (first.inputs[0], path, *first.inputs[2:]), (whole,), first.attrs, first.name),
        Node("Split-13", (whole, split), outputs, {"axis": -1}, first.name),
    )
    layers = {path: graph.program.layers[paths[0]]}
    return Become(first, made, layers=layers, arrays=arrays, constants={split: sizes})


def _arrays(graph: Graph, path: str) -> dict[str, Tensor]:
    """What the layer holds: weight, and bias, scales and biases."""
    start = f"{path}."
    return {name[len(start) :]: array for name, array in graph.program.arrays.items() if name.startswith(start)}


def _scope(path: str) -> tuple[str, str]:
    """The scope in which the layer stands, and its name there."""
    scope, _, name = path.removesuffix(".layer").rpartition(".")
    return scope, name


def _name(graph: Graph, paths: Sequence[str]) -> str:
    """The path of the joined layer: q_proj, k_proj and v_proj make qkv_proj, gate_proj and up_proj gate_up_proj."""
    names = [_scope(path)[1] for path in paths]
    ends = {name.partition("_")[2] for name in names}
    starts = [name.partition("_")[0] for name in names]
    if len(ends) == 1 and all(starts):
        end = ends.pop()
        name = ("" if all(len(start) == 1 for start in starts) else "_").join(starts) + (f"_{end}" if end else "")
    else:
        name = "_".join(names)
    scope = _scope(paths[0])[0]
    path = f"{scope}.{name}" if scope else name
    while any(other == path or other.startswith(f"{path}.") for other in graph.program.arrays):
        path += "_joined"
    return path
