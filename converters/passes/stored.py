"""Stored: what a graph does to a weight before it uses it is done to it once, at conversion."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from converters.match import Answer, Become, Graph, is_kind
from converters.tensors import Tensor
from mlx_transmuter.ops import NAMES
from mlx_transmuter.program import Node

_FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def stored(graph: Graph) -> Iterator[Answer]:
    """Cast of a weight from a float type to another, Reshape, Unsqueeze and Transpose of it → the weight so.

    The transpose of a matrix stays: products and tables read it as it is, and a tied head finds its table by it.
    """
    weights = {name: (name, tensor) for name, tensor in graph.program.arrays.items()}
    taken = set(weights)
    for node in graph.nodes:
        name = node.inputs[0] if node.inputs else ""
        weight, source = weights.get(name, ("", None))
        tensor = _changed(graph, node, source) if source is not None else None
        if tensor is None:
            continue
        weight = f"{weight}_{node.op.partition('-')[0].lower()}"
        while weight in taken:
            weight += "_2"
        taken.add(weight)
        weights[node.outputs[0]] = weight, tensor
        yield Become(node, (), aliases={node.outputs[0]: weight}, arrays={weight: tensor})


def _changed(graph: Graph, node: Node, source: Tensor) -> Tensor | None:
    """The weight after the node, read when it is used; None for a node that is none of these."""
    if is_kind(node, "Cast"):
        kind = NAMES.get(node.attrs.get("to", 0), "")
        if kind not in _FLOATS or source.dtype not in _FLOATS:
            return None
        return Tensor(kind, source.shape, lambda: source.read().astype(_FLOATS[kind]))
    if is_kind(node, "Transpose") and len(source.shape) != 2:
        axes = range(len(source.shape))
        perm = list(node.attrs.get("perm", axes[::-1]))
        if sorted(perm) != list(axes):
            return None
        return Tensor(source.dtype, tuple(source.shape[axis] for axis in perm), lambda: source.read().transpose(perm))
    if is_kind(node, "Reshape") or is_kind(node, "Unsqueeze"):
        shape = _shape(graph, node, source)
        return Tensor(source.dtype, shape, lambda: source.read().reshape(shape)) if shape is not None else None
    return None


def _shape(graph: Graph, node: Node, source: Tensor) -> tuple[int, ...] | None:
    """The shape after a Reshape or an Unsqueeze of the weight, if it is known."""
    constant = graph.constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if constant is None:
        return None
    wanted = [int(size) for size in constant.ravel()]
    if is_kind(node, "Unsqueeze"):
        rank = len(source.shape) + len(wanted)
        axes = {axis % rank for axis in wanted if -rank <= axis < rank}
        rest = iter(source.shape)
        return tuple(1 if i in axes else next(rest) for i in range(rank)) if len(axes) == len(wanted) else None
    sizes = [source.shape[i] if size == 0 and i < len(source.shape) else size for i, size in enumerate(wanted)]
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(source.size // known if size == -1 and known else size for size in sizes)
    return shape if math.prod(shape) == source.size and min(shape, default=1) >= 0 else None
