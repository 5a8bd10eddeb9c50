"""Linear: products with a constant matrix, and the bias after them, become an `nn.Linear` (weight [out, in])."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor
from mlx_transmuter.program import Node


def layer_names(graph: GraphView, weight_name: str, *other_arrays: str) -> tuple[str, str, str]:
    """The path of the layer that gets the weight of that name and the `others`, and what its weight and bias are
    called.

    The path is the scope that the weight stands in. A scope may hold more than its layer does, such as a bias that
    another node adds; the layer then gets a scope of its own.
    """
    path, own = re.sub(r"\.weight(_quantized|_\d+)?$|_quantized$", "", weight_name), (weight_name, *other_arrays)
    path = path if path != weight_name else weight_name.rpartition(".")[0]
    if not path or any(name.startswith(f"{path}.") and name not in own for name in graph.program.tensors):
        path = f"{weight_name.removesuffix('.weight')}.layer"
    return path, f"{path}.weight", f"{path}.bias"


def make_linear_layers(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMul(x, W) [+ b], MatMul(x, Wᵀ) and Gemm(x, W, b) with a constant W and b → mlx.linear."""
    given: dict[str, str] = {}  # the name of a matrix -> the bias that its layer has
    for node in graph.nodes:
        found = match_linear_product(graph, node)
        if found is None:
            continue
        name, matrix, bias = found
        if matrix.dtype not in LAYER_FLOAT_TYPES:
            yield SkippedMatch(node, f"the matrix is {matrix.dtype}; wanted a float type")
            continue
        table = _find_tied_embedding(graph, name, matrix) if not bias else None
        if table is not None:
            yield Replacement(node, (Node("mlx.as_linear", (node.inputs[0], table), node.outputs, name=node.name),))
            continue
        root, outputs = node, node.outputs
        if not bias and (after := graph.only_consumer(node.outputs[0])) and is_op_type(after, "Add"):
            other = [value for value in after.inputs if value != node.outputs[0]]
            tensor = graph.weight(other[0]) if other else None
            if tensor is not None and tensor.shape == matrix.shape[:1] and tensor.dtype == matrix.dtype:
                bias, root, outputs = other[0], after, after.outputs
        if given.setdefault(name, bias) != bias:
            yield SkippedMatch(node, "the matrix is used with two biases; wanted one")
            continue
        readers = graph.consumers(name)
        forms = {(one.op, one.inputs.index(name), one.attrs.get("transB", 0)) for one in readers if name in one.inputs}
        if len(forms) > 1 or not all(name in one.inputs for one in readers):
            yield SkippedMatch(node, "the matrix is read in several ways; wanted products of one form")
            continue
        path, weight, bias_name = layer_names(graph, name, bias)
        arrays = {weight: matrix}
        if bias:
            arrays[bias_name] = graph.program.tensors[bias]
        yield Replacement(
            root,
            (Node("mlx.linear", (node.inputs[0], path), outputs, name=node.name),),
            layers={path: {"kind": "Linear", "bias": bool(bias)}},
            arrays=arrays,
        )


def _find_tied_embedding(graph: GraphView, name: str, matrix: LazyTensor) -> str | None:
    """The path of the embedding whose table the matrix [out, in] is, or is a copy of, as exporters make of tied
    weights.
    """
    own, _, _ = layer_names(graph, name)
    for path, layer in graph.program.layers.items():
        if layer["kind"] != "Embedding":
            continue
        table = graph.program.tensors[f"{path}.weight"]
        if path == own or (table.shape == matrix.shape and table.dtype == matrix.dtype and _same_values(table, matrix)):
            return path
    return None


def _same_values(one: LazyTensor, other: LazyTensor) -> bool:
    first, second = one.read(), other.read()
    return bool((first[:1] == second[:1]).all()) and np.array_equal(first, second)


def match_linear_product(graph: GraphView, node: Node) -> tuple[str, LazyTensor, str] | None:
    """The name of the weight of a product, its matrix as [out, in], and the name of its bias ("" for none)."""
    if is_op_type(node, "MatMul"):
        name = node.inputs[1]
        if (matrix := graph.weight(name)) is not None and len(matrix.shape) == 2:
            return name, matrix.transpose(), ""
        turned = graph.producer(name, "Transpose")
        matrix = graph.weight(turned.inputs[0]) if turned is not None else None
        if turned is not None and matrix is not None and len(matrix.shape) == 2:
            return (turned.inputs[0], matrix, "") if list(turned.attrs.get("perm", [1, 0])) == [1, 0] else None
    if is_op_type(node, "Gemm") and not node.attrs.get("transA", 0):
        matrix = graph.weight(node.inputs[1])
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        plain = node.attrs.get("alpha", 1.0) == 1.0 and (not bias or node.attrs.get("beta", 1.0) == 1.0)
        if matrix is None or not plain:
            return None
        if not node.attrs.get("transB", 0):
            matrix = matrix.transpose()
        tensor = graph.weight(bias) if bias else None
        if not bias or (tensor is not None and tensor.shape == matrix.shape[:1]):
            return node.inputs[1], matrix, bias  # pyright: ignore[reportGeneralTypeIssues]
    return None
