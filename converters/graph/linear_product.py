"""Products with a constant matrix in the graph, and the bias that is added to them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.program import Node


class LinearProduct(NamedTuple):
    """MatMul(x, W), MatMul(x, Wᵀ) or Gemm(x, W, bias).

    node: the MatMul or Gemm. matrix: the name of the matrix as stored, without a Transpose after it. is_input_major:
    whether the matrix is [in, out]; else it is [out, in]. bias: the name of a Gemm's third input, "" for none.
    """

    node: Node
    x: str
    matrix: str
    is_input_major: bool
    bias: str = ""


class BiasAdd(NamedTuple):
    """The Add that gives product + bias, and the name of the bias."""

    node: Node
    bias: str


def match_linear_product(graph: GraphView, node: Node) -> LinearProduct | None:
    """The product that the node is: a MatMul, or a Gemm that scales nothing and takes x as it is; None otherwise."""
    if is_op_type(node, "MatMul"):
        matrix, is_transposed = strip_transpose(graph, node.inputs[1])
        return LinearProduct(node, node.inputs[0], matrix, not is_transposed)
    if not is_op_type(node, "Gemm") or node.attrs.get("transA", 0) or node.attrs.get("alpha", 1.0) != 1.0:
        return None
    bias = [*node.inputs, ""][2]
    if bias and node.attrs.get("beta", 1.0) != 1.0:
        return None
    matrix, is_transposed = strip_transpose(graph, node.inputs[1])
    return LinearProduct(node, node.inputs[0], matrix, is_transposed == bool(node.attrs.get("transB", 0)), bias)


def strip_transpose(graph: GraphView, name: str) -> tuple[str, bool]:
    """The matrix that `name` is the transpose of, and True; or `name` itself, and False."""
    transpose = graph.producer(name, "Transpose")
    if transpose is None or list(transpose.attrs.get("perm", [1, 0])) != [1, 0]:
        return name, False
    return transpose.inputs[0], True


def find_bias_add(
    graph: GraphView, product: Node, shape: tuple[int, ...], dtypes: Collection[str] | None = None
) -> BiasAdd | None:
    """The Add of a weight of that shape to the product, where nothing else reads the product.

    dtypes: the element types that the weight may have; None for any.
    """
    add = graph.only_consumer(product.outputs[0])
    if add is None or not is_op_type(add, "Add"):
        return None
    for name in add.inputs:
        weight = graph.weight(name)
        if weight is not None and weight.shape == shape and (dtypes is None or weight.dtype in dtypes):
            return BiasAdd(add, name)
    return None
