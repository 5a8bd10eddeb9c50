"""Transforms of weights: a cast, reshape or transpose of a weight is computed once, at conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES
from mlx_transmuter.program import Node


def fold_weight_transforms(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces Cast from a float type to another, Reshape, Unsqueeze and Transpose of a weight by a new weight.

    The transpose of a matrix stays: products and tables read it as it is, and a tied head finds its table by it.
    """
    weights = {name: (name, tensor) for name, tensor in graph.program.tensors.items()}
    taken = set(weights)
    for node in graph.nodes:
        source_name, source = weights.get(node.inputs[0] if node.inputs else "", ("", None))
        tensor = _transform_weight(graph, node, source) if source is not None else None
        if tensor is None:
            continue
        weight = f"{source_name}_{node.op_type.lower()}"
        while weight in taken:
            weight += "_2"
        taken.add(weight)
        weights[node.outputs[0]] = weight, tensor
        yield Replacement(node, (), aliases={node.outputs[0]: weight}, tensors={weight: tensor})


def _transform_weight(graph: GraphView, node: Node, source: LazyTensor) -> LazyTensor | None:
    """Returns the weight after the node, computed when it is read; None for a node that is no such transform."""
    if is_op_type(node, "Cast"):
        return _cast_weight(node, source)
    if is_op_type(node, "Transpose") and len(source.shape) != 2:
        return _transpose_weight(node, source)
    shape = None
    constant = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if constant is not None and is_op_type(node, "Reshape"):
        shape = _reshaped_shape(source, [int(size) for size in constant.ravel()])
    elif constant is not None and is_op_type(node, "Unsqueeze"):
        shape = _unsqueezed_shape(source, [int(axis) for axis in constant.ravel()])
    return source.reshape(shape) if shape is not None else None


def _cast_weight(node: Node, source: LazyTensor) -> LazyTensor | None:
    dtype = ELEMENT_TYPE_NAMES.get(node.attrs.get("to", 0), "")
    if dtype not in LAYER_FLOAT_TYPES or source.dtype not in LAYER_FLOAT_TYPES:
        return None
    return source.cast(dtype)


def _transpose_weight(node: Node, source: LazyTensor) -> LazyTensor | None:
    axes = range(len(source.shape))
    perm = list(node.attrs.get("perm", axes[::-1]))
    if sorted(perm) != list(axes):
        return None
    return source.transpose(perm)


def _unsqueezed_shape(source: LazyTensor, new_axes: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the shape after an Unsqueeze, or None for axes that the result does not have."""
    rank = len(source.shape) + len(new_axes)
    axes = {axis % rank for axis in new_axes if -rank <= axis < rank}
    if len(axes) != len(new_axes):
        return None
    old_sizes = iter(source.shape)
    return tuple(1 if axis in axes else next(old_sizes) for axis in range(rank))


def _reshaped_shape(source: LazyTensor, target: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the shape after a Reshape to `target`, in which 0 keeps a size and -1 takes the rest; None if invalid."""
    sizes = [source.shape[i] if size == 0 and i < len(source.shape) else size for i, size in enumerate(target)]
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(source.size // known if size == -1 and known else size for size in sizes)
    return shape if math.prod(shape) == source.size and min(shape, default=1) >= 0 else None
