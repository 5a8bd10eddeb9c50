"""Products with a constant matrix, and the bias added to them, become `nn.Linear` layers (weight [out, in])."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import LayerView, name_arrays
from mlx_transmuter.converters.graph.linear_product import LinearProduct, find_bias_add, match_linear_product
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.program import Node


def make_linear_layers(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMul(x, W) [+ b], MatMul(x, Wᵀ) and Gemm(x, W, b) with a constant W and b → mlx.linear.

    A head whose matrix is an embedding's table, or a copy of it, becomes mlx.as_linear of that embedding.
    """
    biases: dict[str, str] = {}  # the name of a matrix -> the bias that its layer has
    for node in graph.nodes:
        match = match_weight_product(graph, node)
        if match is None:
            continue
        product, weight = match
        if weight.dtype not in LAYER_FLOAT_TYPES:
            yield SkippedMatch(node, f"the matrix is {weight.dtype}; expected a float type")
            continue
        table_path = _find_tied_embedding(graph, product.matrix, weight) if not product.bias else None
        if table_path is not None:
            yield replace_with_tied_head(node, product.x, table_path)
            continue
        root, bias = node, product.bias
        if not bias and (bias_add := find_bias_add(graph, node, weight.shape[:1], (weight.dtype,))):
            root, bias = bias_add
        if biases.setdefault(product.matrix, bias) != bias:
            yield SkippedMatch(node, "the matrix is used with two biases; expected one")
        elif not _is_read_in_one_form(graph, product.matrix):
            yield SkippedMatch(node, "the matrix is read in several ways; expected products of one form")
        else:
            yield _replace_with_linear(graph, root, product._replace(bias=bias), weight)


def _replace_with_linear(graph: GraphView, root: Node, product: LinearProduct, weight: LazyTensor) -> Replacement:
    path = layer_path(graph, product.matrix, product.bias)
    arrays = {"weight": weight} | ({"bias": graph.program.tensors[product.bias]} if product.bias else {})
    return Replacement(
        root,
        (Node("mlx.linear", (product.x, path), root.outputs, name=product.node.name),),
        layers={path: {"kind": "Linear", "bias": bool(product.bias)}},
        tensors=name_arrays(path, arrays),
    )


def match_weight_product(graph: GraphView, node: Node) -> tuple[LinearProduct, LazyTensor] | None:
    """The product with a weight that the node is, and the weight as [out, in]."""
    product = match_linear_product(graph, node)
    weight = graph.weight(product.matrix) if product is not None else None
    if product is None or weight is None or len(weight.shape) != 2:
        return None
    if is_op_type(node, "Gemm") and product.matrix != node.inputs[1]:
        return None  # a Transpose before a Gemm: the weight's readers would not show which way each product takes it
    weight = weight.transpose() if product.is_input_major else weight
    bias = graph.weight(product.bias) if product.bias else None
    if product.bias and (bias is None or bias.shape != weight.shape[:1]):
        return None
    return product, weight


def replace_with_tied_head(product: Node, x: str, table_path: str) -> Replacement:
    """The product of x with the transposed table of the embedding at that path."""
    return Replacement(product, (Node("mlx.as_linear", (x, table_path), product.outputs, name=product.name),))


def _is_read_in_one_form(graph: GraphView, matrix: str) -> bool:
    """Whether all nodes that read the matrix are of one operator, read it as the same input and transpose it alike."""
    readers = graph.consumers(matrix)
    if not all(matrix in reader.inputs for reader in readers):
        return False  # a branch of the node reads it
    return len({(reader.op, reader.inputs.index(matrix), reader.attrs.get("transB", 0)) for reader in readers}) <= 1


def _find_tied_embedding(graph: GraphView, matrix: str, weight: LazyTensor) -> str | None:
    """The path of the embedding whose table the weight [out, in] is, or is a copy of, as exporters make of tied
    weights.
    """
    own_path, view = layer_path(graph, matrix), LayerView(graph.program)
    for path, layer in graph.program.layers.items():
        if layer["kind"] != "Embedding":
            continue
        table = view.arrays(path)["weight"]
        if path == own_path:
            return path
        if table.shape == weight.shape and table.dtype == weight.dtype and _has_same_values(table, weight):
            return path
    return None


def _has_same_values(table: LazyTensor, weight: LazyTensor) -> bool:
    rows, other_rows = table.read(), weight.read()
    # The first row alone tells most tables apart.
    return bool((rows[:1] == other_rows[:1]).all()) and np.array_equal(rows, other_rows)
