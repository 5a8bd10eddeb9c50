"""Joined: products of one input become one product, as of queries, keys and values, or of a gate and what it gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, concatenate_tensors
from mlx_transmuter.program import Node

# The axis of a layer's outputs in all that it holds.
_OUTPUT_AXES = {"mlx.linear": 0, "mlx.switch_linear": 1}


def merge_projections(graph: GraphView) -> Iterator[MatchOutcome]:
    """mlx.linear(x, a), mlx.linear(x, b), … of one scope and one kind of layer → mlx.linear(x, ab) and a Split; so for
    mlx.switch_linear, of which the matrices of each expert stand below one another.

    The matrices stand below one another, so each output is what it was, and a short x costs one pass in place of
    several.
    """
    groups: dict[tuple, list[Node]] = {}
    for node in graph.nodes:
        if node.op not in _OUTPUT_AXES:
            continue
        path = node.inputs[1]
        layer = graph.program.layers[path]
        types = tuple((part, array.dtype) for part, array in _layer_arrays(graph, path).items())
        others = (node.op, node.inputs[0], *node.inputs[2:])
        scope = (
            _scope_and_name(path)[0] if node.op == "mlx.linear" else ""
        )  # rows for experts are read by one mixture alone
        key = (others, scope, tuple(sorted(layer.items())), tuple(node.attrs.items()), types)
        groups.setdefault(key, []).append(node)
    for nodes in groups.values():
        paths = [node.inputs[1] for node in nodes]
        if len(nodes) > 1 and all(len(graph.consumers(path)) == 1 for path in paths):
            yield _merge(graph, nodes, paths)
            yield from (Replacement(node, ()) for node in nodes[1:])


def _merge(graph: GraphView, nodes: Sequence[Node], paths: Sequence[str]) -> Replacement:
    first, path = nodes[0], _merged_path(graph, paths)
    parts = [_layer_arrays(graph, one) for one in paths]
    axis = _OUTPUT_AXES[first.op]
    arrays = {f"{path}.{part}": concatenate_tensors([one[part] for one in parts], axis) for part in parts[0]}
    sizes = np.array([one["weight"].shape[axis] for one in parts], np.int64)
    whole, split = f"{first.outputs[0]}.joined", f"{path}.split"
    outputs = tuple(node.outputs[0] for node in nodes)
    made = (
        Node(first.op, (first.inputs[0], path, *first.inputs[2:]), (whole,), first.attrs, first.name),
        Node("Split-13", (whole, split), outputs, {"axis": -1}, first.name),
    )
    layers = {path: graph.program.layers[paths[0]]}
    return Replacement(first, made, layers=layers, arrays=arrays, constants={split: sizes})


def _layer_arrays(graph: GraphView, path: str) -> dict[str, LazyTensor]:
    """What the layer holds: weight, and bias, scales and biases."""
    start = f"{path}."
    return {name[len(start) :]: array for name, array in graph.program.tensors.items() if name.startswith(start)}


def _scope_and_name(path: str) -> tuple[str, str]:
    """The scope in which the layer stands, and its name there."""
    scope, _, name = path.removesuffix(".layer").rpartition(".")
    return scope, name


def _merged_path(graph: GraphView, paths: Sequence[str]) -> str:
    """The path of the joined layer: q_proj, k_proj and v_proj make qkv_proj, gate_proj and up_proj gate_up_proj."""
    names = [_scope_and_name(path)[1] for path in paths]
    ends = {name.partition("_")[2] for name in names}
    starts = [name.partition("_")[0] for name in names]
    if len(ends) == 1 and all(starts):
        end = ends.pop()
        name = ("" if all(len(start) == 1 for start in starts) else "_").join(starts) + (f"_{end}" if end else "")
    else:
        name = "_".join(names)
    scope = _scope_and_name(paths[0])[0]
    path = f"{scope}.{name}" if scope else name
    while any(other == path or other.startswith(f"{path}.") for other in graph.program.tensors):
        path += "_joined"
    return path
