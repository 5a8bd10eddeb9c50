"""Linear layers of one input become one layer, as those of queries, keys and values, or of a gate and its input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.layer_view import LayerView, name_arrays
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import concatenate_tensors
from mlx_transmuter.program import Node

# The axis of the outputs in all arrays of a layer.
_OUTPUT_AXES = {"mlx.linear": 0, "mlx.switch_linear": 1}


def merge_projections(graph: GraphView) -> Iterator[MatchOutcome]:
    """mlx.linear(x, a), mlx.linear(x, b), … of one scope and one kind of layer → mlx.linear(x, ab) and a Split.

    Likewise mlx.switch_linear, whose matrices are concatenated expert by expert.

    The matrices are concatenated along their outputs: each output keeps its numbers, and a short x costs one pass over
    it instead of several.
    """
    groups: dict[tuple, list[Node]] = {}
    new_arrays: set[str] = set()  # of the groups before
    for node in graph.nodes:
        if node.op in _OUTPUT_AXES:
            groups.setdefault(_group_key(graph, node), []).append(node)
    for nodes in groups.values():
        paths = [node.inputs[1] for node in nodes]
        if len(nodes) > 1 and all(len(graph.consumers(path)) == 1 for path in paths):
            replacement = _merge(graph, nodes, paths, new_arrays)
            new_arrays |= replacement.tensors.keys()
            yield replacement
            yield from (Replacement(node, ()) for node in nodes[1:])


def _group_key(graph: GraphView, node: Node) -> tuple:
    """What layers that can be merged have in common: operator, inputs, attributes, scope, options and array types."""
    path = node.inputs[1]
    dtypes = tuple((part, array.dtype) for part, array in LayerView(graph.program).arrays(path).items())
    # The rows of experts are read by one mixture only, whose layers may stand in different scopes.
    scope = _split_path(path)[0] if node.op == "mlx.linear" else ""
    options = tuple(sorted(graph.program.layers[path].items()))
    return (node.op, node.inputs[0], *node.inputs[2:]), scope, options, tuple(node.attrs.items()), dtypes


def _merge(graph: GraphView, nodes: Sequence[Node], paths: Sequence[str], new_arrays: Collection[str]) -> Replacement:
    """The product of one layer in place of the nodes. new_arrays: names that weights of the program will have."""
    first, view = nodes[0], LayerView(graph.program)
    path = view.free_path(_merged_path(paths), "_merged", added=new_arrays)
    layers = [view.arrays(path) for path in paths]
    axis = _OUTPUT_AXES[first.op]
    arrays = {part: concatenate_tensors([layer[part] for layer in layers], axis) for part in layers[0]}
    merged, sizes = f"{first.outputs[0]}.merged", f"{path}.split"
    outputs = tuple(node.outputs[0] for node in nodes)
    return Replacement(
        first,
        (
            Node(first.op, (first.inputs[0], path, *first.inputs[2:]), (merged,), first.attrs, first.name),
            Node("Split-13", (merged, sizes), outputs, {"axis": -1}, first.name),
        ),
        layers={path: graph.program.layers[paths[0]]},
        tensors=name_arrays(path, arrays),
        constants={sizes: np.array([layer["weight"].shape[axis] for layer in layers], np.int64)},
    )


def _split_path(path: str) -> tuple[str, str]:
    """The scope in which the layer stands, and its name there."""
    scope, _, name = path.removesuffix(".layer").rpartition(".")
    return scope, name


def _merged_path(paths: Sequence[str]) -> str:
    """The path of the merged layer: q_proj, k_proj and v_proj make qkv_proj, gate_proj and up_proj gate_up_proj."""
    names = [_split_path(path)[1] for path in paths]
    ends = {name.partition("_")[2] for name in names}
    starts = [name.partition("_")[0] for name in names]
    if len(ends) == 1 and all(starts):
        start = ("" if all(len(start) == 1 for start in starts) else "_").join(starts)
        end = ends.pop()
        name = f"{start}_{end}" if end else start
    else:
        name = "_".join(names)
    scope = _split_path(paths[0])[0]
    return f"{scope}.{name}" if scope else name
