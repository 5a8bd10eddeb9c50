"""Integers: weights that a file keeps in integers and turns into floats itself become MLX's quantised layers.

`integers` does this for DequantizeLinear of a weight, which changes no activation: the layer stands for the same
numbers. `float_activations` does it for products of 8-bit integers, whose activations it leaves in float; it is a
change of the numbers, which a conversion makes only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.tensor_protos import ELEMENT_BITS as WIDTHS
from mlx_transmuter.converters.passes.layers.linear import layer_names
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    LAYER_BITS,
    BlockQuantizedWeight,
    build_layer_arrays,
    cast_to_file_dtype,
    replace_with_linear,
)
from mlx_transmuter.converters.proof.proof import quantizes_dynamically
from mlx_transmuter.program import Node

_INTEGER_DTYPES = ("int8", "uint8", "int4", "uint4", "int2", "uint2")


def absorb_dequantize_linear(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMul(x, DequantizeLinear(W)) and Gemm → mlx.linear, Gather(DequantizeLinear(W), ids) and
    DequantizeLinear(Gather(W, ids)) → mlx.embedding; DequantizeLinear of another constant becomes a weight in floats.

    In a dynamic graph all stays: its roundings follow every bit.
    """
    if quantizes_dynamically(graph.program):
        return
    tables: dict[str, str] = {}
    for node in graph.nodes:
        found = _replace_embedding(graph, node)
        if found is not None:
            tables[found[0]] = next(iter(found[1].layers))
            yield found[1]
    for node in graph.nodes:
        if is_op_type(node, "DequantizeLinear") and (tensor := graph.weight(node.inputs[0])) is not None:
            yield from _replace_weight_readers(graph, node, tensor, tables)


def _replace_weight_readers(
    graph: GraphView, node: Node, tensor: LazyTensor, tables: dict[str, str]
) -> Iterator[MatchOutcome]:
    """What becomes of a weight in integers that products, or anything else, read as floats."""
    products = [
        found
        for reader in graph.consumers(node.outputs[0])
        if (found := _match_product(graph, reader, node)) is not None
    ]
    left = len(graph.consumers(node.outputs[0])) - len(products)
    for product, x, turned, bias in products:
        made = _block_weight(graph, node, tensor, turned)
        if isinstance(made, str):
            yield SkippedMatch(product, made)
            left += 1
        elif (table := tables.get(node.inputs[0])) and not turned and not bias:
            yield Replacement(product, (Node("mlx.as_linear", (x, table), product.outputs, name=product.name),))
        else:
            # A layer in floats has no scales, so it cannot stand where the file's are.
            path, _, _ = layer_names(graph, node.inputs[0], *(node.inputs[1:] if made.group_size else ()))
            yield replace_with_linear(graph, product, x, path, made, bias, is_only_reader=len(products) == 1)
    if left and tensor.dtype not in ("int32", *_INTEGER_DTYPES):
        yield SkippedMatch(node, f"the weight is {tensor.dtype}")
    elif left:
        scale, zero = (_weight_or_constant(graph, name) for name in [*node.inputs[1:3], ""][:2])
        if scale is not None:
            name = f"{node.outputs[0]}.floats"
            floats = LazyTensor(_scale_dtype(graph, node), tensor.shape, lambda: _dequantize(tensor, scale, zero, node))
            yield Replacement(node, (), aliases={node.outputs[0]: name}, arrays={name: floats})


def _match_product(graph: GraphView, reader: Node, node: Node) -> tuple[Node, str, bool, str] | None:
    """The product that reads the weight, its other input, whether it takes the weight as [in, out], and its bias."""
    turned, value = True, node.outputs[0]
    if is_op_type(reader, "Transpose") and list(reader.attrs.get("perm", [1, 0])) == [1, 0]:
        after = graph.only_consumer(reader.outputs[0])
        if after is None:
            return None
        reader, turned, value = after, False, reader.outputs[0]
    if is_op_type(reader, "MatMul") and reader.inputs[1] == value != reader.inputs[0]:
        return reader, reader.inputs[0], turned, ""
    if is_op_type(reader, "Gemm") and reader.inputs[1] == value and not reader.attrs.get("transA", 0):
        turned = turned != bool(reader.attrs.get("transB", 0))
        plain = reader.attrs.get("alpha", 1.0) == reader.attrs.get("beta", 1.0) == 1.0
        bias = [*reader.inputs, ""][2]
        if plain and (not bias or graph.weight(bias) is not None):
            return reader, reader.inputs[0], turned, bias
    return None


def _replace_embedding(graph: GraphView, node: Node) -> tuple[str, Replacement] | None:
    """The weight in integers of which the node gives rows in floats, and the layer that it becomes."""
    if is_op_type(node, "Gather") and (given := graph.producer(node.inputs[0], "DequantizeLinear")) is not None:
        gather, read = node, given
        name = read.inputs[0]
    elif is_op_type(node, "DequantizeLinear") and (given := graph.producer(node.inputs[0], "Gather")) is not None:
        gather, read = given, node
        name = gather.inputs[0]
        scale = _weight_or_constant(graph, read.inputs[1])
        if scale is None or scale.size != 1:
            return None
    else:
        return None
    tensor = graph.weight(name)
    if tensor is None or len(tensor.shape) != 2 or gather.attrs.get("axis", 0) != 0:
        return None
    made = _block_weight(graph, read, tensor, is_transposed=False)
    if isinstance(made, str) or made.group_size is None or made.padding_columns:
        return None
    path, _, _ = layer_names(graph, name, *read.inputs[1:])
    arrays, options = build_layer_arrays(path, made)
    nodes = cast_to_file_dtype(Node("mlx.embedding", (gather.inputs[1], path), node.outputs, name=node.name), made)
    return name, Replacement(node, nodes, layers={path: {"kind": "QuantizedEmbedding", **options}}, arrays=arrays)


def drop_activation_quantization(graph: GraphView) -> Iterator[MatchOutcome]:
    """Products of activations rounded to 8 bits with weights in 8 bits → mlx.linear of the activations as they are.

    QuantizeLinear and DequantizeLinear around a value go; DynamicQuantizeLinear, MatMulInteger and the scales after it,
    DynamicQuantizeMatMul and MatMulIntegerToFloat become layers.
    """
    for node in graph.nodes:
        if (
            is_op_type(node, "DequantizeLinear")
            and (given := graph.producer(node.inputs[0], "QuantizeLinear")) is not None
        ):
            yield Replacement(node, (), aliases={node.outputs[0]: given.inputs[0]})
        elif is_op_type(node, "MatMulInteger"):
            yield _replace_matmul_integer(graph, node)
        elif is_op_type(node, "com.microsoft.DynamicQuantizeMatMul"):
            names = dict(enumerate(node.inputs))
            yield _replace_integer_product(
                graph, node, node, node.inputs[0], [names.get(i, "") for i in (1, 2, 3)], names.get(4, "")
            )
        elif is_op_type(node, "com.microsoft.MatMulIntegerToFloat"):
            names = dict(enumerate(node.inputs))
            x = _unquantized_input(graph, node.inputs[0])
            weight = [names.get(i, "") for i in (1, 3, 5)]
            yield (
                _replace_integer_product(graph, node, node, x, weight, names.get(6, ""))
                if x
                else SkippedMatch(node, "its input is no float")
            )


def _unquantized_input(graph: GraphView, name: str) -> str:
    """The float value that the integers are rounded from, or ""."""
    node = graph.producer(name)
    kinds = ("DynamicQuantizeLinear", "QuantizeLinear")
    return node.inputs[0] if node is not None and is_op_type(node, *kinds) else ""


def _replace_matmul_integer(graph: GraphView, node: Node) -> MatchOutcome:
    """Mul(Cast(MatMulInteger(x, W)), Mul(scale of x, scale of W)), as onnxruntime's dynamic quantisation writes it."""
    x = _unquantized_input(graph, node.inputs[0])
    cast = graph.only_consumer(node.outputs[0])
    scaled = graph.only_consumer(cast.outputs[0]) if cast is not None and is_op_type(cast, "Cast") else None
    if not x or scaled is None or not is_op_type(scaled, "Mul") or cast is None:
        return SkippedMatch(node, "it is not between a rounding of floats and the product with their scales")
    source = graph.producer(node.inputs[0])
    assert source is not None
    own = source.outputs[1] if is_op_type(source, "DynamicQuantizeLinear") else source.inputs[1]
    other = next(name for name in scaled.inputs if name != cast.outputs[0])
    scales = graph.producer(other, "Mul")
    both = list(scales.inputs) if scales is not None else []
    if len(both) != 2 or own not in both:
        return SkippedMatch(node, "the scale after it is not that of its input times that of its weight")
    both.remove(own)
    weight, zero = node.inputs[1:2], [*node.inputs, "", ""][3]
    return _replace_integer_product(graph, node, scaled, x, [*weight, both[0], zero], "")


def _replace_integer_product(
    graph: GraphView, node: Node, root: Node, x: str, weight_names: list[str], bias: str
) -> MatchOutcome:
    """The product of x with the weight of these names (values [in, out], scale, zero point) as a layer."""
    tensor = graph.weight(weight_names[0])
    if tensor is None:
        return SkippedMatch(node, "its weight is no constant")
    inputs = tuple(name for name in weight_names if name)
    reader = Node("DequantizeLinear-13", inputs, ("",), {"axis": 1})  # which gives the weight in floats
    made = _block_weight(graph, reader, tensor, is_transposed=True)
    if isinstance(made, str):
        return SkippedMatch(node, made)
    if bias and ((given := graph.weight(bias)) is None or given.shape != (made.rows,)):
        return SkippedMatch(node, "its bias is no weight of rank 1")
    path, _, _ = layer_names(graph, weight_names[0], *weight_names[1:], bias)
    return replace_with_linear(
        graph, root, x, path, made, bias, is_only_reader=len(graph.consumers(weight_names[0])) == 1
    )


def _weight_or_constant(graph: GraphView, name: str) -> np.ndarray | None:
    """The values of a constant or weight, or None for another value."""
    tensor = graph.weight(name) if name else None
    return tensor.read() if tensor is not None else graph.constant(name) if name else None


def _scale_dtype(graph: GraphView, node: Node) -> str:
    """The float type that the node gives: that of its scale."""
    tensor = graph.weight(node.inputs[1])
    constant = graph.constant(node.inputs[1])
    return tensor.dtype if tensor is not None else constant.dtype.name if constant is not None else "float32"


def _block_weight(graph: GraphView, node: Node, tensor: LazyTensor, is_transposed: bool) -> BlockQuantizedWeight | str:
    """The weight that a DequantizeLinear gives, as [rows, columns] of a layer (turned: it lies [columns, rows]); or why
    it has no such form.
    """
    if tensor.dtype not in _INTEGER_DTYPES or WIDTHS[tensor.dtype] not in LAYER_BITS or len(tensor.shape) != 2:
        return f"the weight is {tensor.dtype} of rank {len(tensor.shape)}"
    scale, zero = (_weight_or_constant(graph, name) for name in [*node.inputs[1:3], ""][:2])
    if scale is None or (any(node.inputs[2:]) and zero is None):
        return "its scale or zero point is no constant"
    rows, columns = (tensor.shape[1], tensor.shape[0]) if is_transposed else (tensor.shape[0], tensor.shape[1])
    along = 0 if is_transposed else 1  # the axis of the file's weight that a layer's columns are
    axis, size = int(node.attrs.get("axis", 1)) % 2, int(node.attrs.get("block_size", 0))
    if scale.size == 1:
        block, shape = columns, (1, 1)
    elif size and axis == along:
        block, shape = size, (rows, -(-columns // size))
    elif not size and axis != along:
        block, shape = columns, (rows, 1)
    else:
        return "its scales are along the other axis"

    def spread(values: np.ndarray) -> np.ndarray:
        values = values.T if is_transposed and values.ndim == 2 and size else values
        return np.broadcast_to(values.reshape(shape), (rows, shape[1])).astype(np.float32)

    bits = WIDTHS[tensor.dtype]
    shift = 0 if tensor.dtype.startswith("u") else 1 << (bits - 1)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values = tensor.read().astype(np.int16) + shift
        zeros = np.zeros(scale.shape, np.float32) if zero is None else zero.astype(np.float32)
        return (values.T if is_transposed else values).astype(np.uint8), spread(scale), spread(zeros) + shift

    return BlockQuantizedWeight(rows, columns, block, bits, _scale_dtype(graph, node), read)


def _dequantize(tensor: LazyTensor, scale: np.ndarray, zero: np.ndarray | None, node: Node) -> np.ndarray:
    """What DequantizeLinear gives of the tensor, in the scale's type. ONNX DequantizeLinear-10 to -25."""
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))

    def spread(values: np.ndarray) -> np.ndarray:
        if values.size == 1:
            return values.reshape(())
        if block:
            return np.repeat(values, block, axis=axis).take(range(tensor.shape[axis]), axis=axis)
        return values.reshape([-1 if i == axis % len(tensor.shape) else 1 for i in range(len(tensor.shape))])

    values = tensor.read().astype(np.float32) - (0 if zero is None else spread(zero).astype(np.float32))
    return (values * spread(scale).astype(np.float32)).astype(scale.dtype)
