"""Products of activations that a file rounds to 8 bits become quantized layers that take the activations in floats.

This changes the numbers: it is a precision option of a conversion, applied only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.passes.layers.integer_weight import IntegerWeight
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.quantized_blocks import BlockProduct, replace_with_quantized_linear
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node

_DYNAMIC_QUANTIZE_MATMUL = "com.microsoft.DynamicQuantizeMatMul"
_MATMUL_INTEGER_TO_FLOAT = "com.microsoft.MatMulIntegerToFloat"


class _IntegerProduct(NamedTuple):
    """A product of integers [.., in] and [in, out], scaled back to floats.

    root: the node that gives the floats. x: the floats that the left integers are rounded from. weight: the names of
    the right integers, their scale and their zero point; the last one and the bias are "" for none.
    """

    root: Node
    x: str
    weight: tuple[str, str, str]
    bias: str = ""


def drop_activation_quantization(graph: GraphView) -> Iterator[MatchOutcome]:
    """Products of activations rounded to 8 bits with weights in 8 bits → mlx.linear of the activations as they are.

    QuantizeLinear and DequantizeLinear around a value are dropped; DynamicQuantizeLinear, MatMulInteger and the scales
    after it, DynamicQuantizeMatMul and MatMulIntegerToFloat become layers.
    """
    for node in graph.nodes:
        if is_op_type(node, "DequantizeLinear"):
            quantize = graph.producer(node.inputs[0], "QuantizeLinear")
            if quantize is not None:
                yield Replacement(node, (), aliases={node.outputs[0]: quantize.inputs[0]})
            continue
        product = _match_integer_product(graph, node)
        if isinstance(product, str):
            yield SkippedMatch(node, product)
        elif product is not None:
            yield _replace_integer_product(graph, node, product)


def _match_integer_product(graph: GraphView, node: Node) -> _IntegerProduct | str | None:
    """The product of integers that the node computes, why it is left as it is, or None for another node."""
    if is_op_type(node, "MatMulInteger"):
        return _match_matmul_integer(graph, node)
    if not is_op_type(node, _DYNAMIC_QUANTIZE_MATMUL, _MATMUL_INTEGER_TO_FLOAT):
        return None
    inputs = bind_inputs(node)
    x = inputs["a"] if is_op_type(node, _DYNAMIC_QUANTIZE_MATMUL) else _unquantized_input(graph, inputs["a"])
    if not x:
        return "its input is not rounded floats"
    weight = (inputs["b"], inputs["b_scale"], inputs.get("b_zero_point", ""))
    return _IntegerProduct(node, x, weight, inputs.get("bias", ""))


def _match_matmul_integer(graph: GraphView, node: Node) -> _IntegerProduct | str:
    """Mul(Cast(MatMulInteger(x, W)), Mul(scale of x, scale of W)), as onnxruntime's dynamic quantization writes it."""
    inputs = bind_inputs(node)
    x = _unquantized_input(graph, inputs["a"])
    cast = graph.only_consumer(node.outputs[0])
    scaled = graph.only_consumer(cast.outputs[0]) if cast is not None and is_op_type(cast, "Cast") else None
    if not x or cast is None or scaled is None or not is_op_type(scaled, "Mul"):
        return "it is not between a rounding of floats and the product with their scales"
    quantize = graph.producer(inputs["a"])
    assert quantize is not None
    x_scale = quantize.outputs[1] if is_op_type(quantize, "DynamicQuantizeLinear") else quantize.inputs[1]
    scales = graph.producer(next(name for name in scaled.inputs if name != cast.outputs[0]), "Mul")
    factors = list(scales.inputs) if scales is not None else []
    if len(factors) != 2 or x_scale not in factors:
        return "the scale after it is not that of its input times that of its weight"
    factors.remove(x_scale)
    return _IntegerProduct(scaled, x, (inputs["b"], factors[0], inputs.get("b_zero_point", "")))


def _unquantized_input(graph: GraphView, name: str) -> str:
    """The floats that the integers are rounded from, or ""."""
    node = graph.producer(name, "DynamicQuantizeLinear", "QuantizeLinear")
    return node.inputs[0] if node is not None else ""


def _replace_integer_product(graph: GraphView, node: Node, product: _IntegerProduct) -> MatchOutcome:
    weight = IntegerWeight.from_names(graph, product.weight, axis=1)
    if weight is None:
        return SkippedMatch(node, "its weight, scale or zero point is no constant")
    blocks = weight.as_blocks(is_input_major=True)
    if isinstance(blocks, str):
        return SkippedMatch(node, blocks)
    bias = graph.weight(product.bias) if product.bias else None
    if product.bias and (bias is None or bias.shape != (blocks.rows,)):
        return SkippedMatch(node, "its bias is no weight of rank 1")
    values, *scales = product.weight
    path = layer_path(graph, values, *scales, product.bias)
    is_only_reader = len(graph.consumers(values)) == 1
    return replace_with_quantized_linear(
        graph, path, BlockProduct(product.root, product.x, blocks, product.bias, is_only_reader)
    )
