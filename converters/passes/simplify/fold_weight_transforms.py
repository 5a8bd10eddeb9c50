"""Stored: what a graph does to a weight before it uses it is done to it once, at conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES
from mlx_transmuter.program import Node


def fold_weight_transforms(graph: GraphView) -> Iterator[MatchOutcome]:
    """Cast of a weight from a float type to another, Reshape, Unsqueeze and Transpose of it → the weight so.

    The transpose of a matrix stays: products and tables read it as it is, and a tied head finds its table by it.
    """
    weights = {name: (name, tensor) for name, tensor in graph.program.tensors.items()}
    taken = set(weights)
    for node in graph.nodes:
        name = node.inputs[0] if node.inputs else ""
        weight, source = weights.get(name, ("", None))
        tensor = _transform_weight(graph, node, source) if source is not None else None
        if tensor is None:
            continue
        weight = f"{weight}_{node.op.partition('-')[0].lower()}"
        while weight in taken:
            weight += "_2"
        taken.add(weight)
        weights[node.outputs[0]] = weight, tensor
        yield Replacement(node, (), aliases={node.outputs[0]: weight}, arrays={weight: tensor})


def _transform_weight(graph: GraphView, node: Node, source: LazyTensor) -> LazyTensor | None:
    """The weight after the node, read when it is used; None for a node that is none of these."""
    if is_op_type(node, "Cast"):
        kind = ELEMENT_TYPE_NAMES.get(node.attrs.get("to", 0), "")
        return source.cast(kind) if {kind, source.dtype} <= {*LAYER_FLOAT_TYPES} else None
    if is_op_type(node, "Transpose") and len(source.shape) != 2:
        axes = range(len(source.shape))
        perm = list(node.attrs.get("perm", axes[::-1]))
        return source.transpose(perm) if sorted(perm) == list(axes) else None
    if is_op_type(node, "Reshape") or is_op_type(node, "Unsqueeze"):
        shape = _reshaped_shape(graph, node, source)
        return source.reshape(shape) if shape is not None else None
    return None


def _reshaped_shape(graph: GraphView, node: Node, source: LazyTensor) -> tuple[int, ...] | None:
    """The shape after a Reshape or an Unsqueeze of the weight, if it is known."""
    constant = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if constant is None:
        return None
    wanted = [int(size) for size in constant.ravel()]
    if is_op_type(node, "Unsqueeze"):
        rank = len(source.shape) + len(wanted)
        axes = {axis % rank for axis in wanted if -rank <= axis < rank}
        rest = iter(source.shape)
        return tuple(1 if i in axes else next(rest) for i in range(rank)) if len(axes) == len(wanted) else None
    sizes = [source.shape[i] if size == 0 and i < len(source.shape) else size for i, size in enumerate(wanted)]
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(source.size // known if size == -1 and known else size for size in sizes)
    return shape if math.prod(shape) == source.size and min(shape, default=1) >= 0 else None
