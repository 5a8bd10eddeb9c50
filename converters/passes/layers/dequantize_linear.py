"""Weights that a file stores in integers and dequantizes itself (DequantizeLinear) become MLX's quantized layers.

A layer stands for the same numbers and no activation changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.activation_quantization import quantizes_dynamically
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.linear_product import LinearProduct, match_linear_product
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.passes.layers.integer_weight import PACKABLE_DTYPES, IntegerWeight
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.linear_layers import replace_with_tied_head
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    BlockProduct,
    replace_with_quantized_embedding,
    replace_with_quantized_linear,
)
from mlx_transmuter.program import Node


def absorb_dequantize_linear(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMul(x, DequantizeLinear(W)) and Gemm → mlx.linear, Gather(DequantizeLinear(W), ids) and
    DequantizeLinear(Gather(W, ids)) → mlx.embedding; DequantizeLinear of another constant → a weight in floats.

    A graph that quantizes activations by scales of each step is left as it is: its roundings follow every bit.
    """
    if quantizes_dynamically(graph.program):
        return
    table_paths: dict[str, str] = {}  # the name of an embedding's weight -> the path of its layer
    for node in graph.nodes:
        embedding = _replace_embedding(graph, node)
        if embedding is not None:
            weight_name, replacement = embedding
            table_paths[weight_name] = next(iter(replacement.layers))
            yield replacement
    for node in graph.nodes:
        if is_op_type(node, "DequantizeLinear") and graph.weight(node.inputs[0]) is not None:
            yield from _replace_readers(graph, node, table_paths)


def _replace_readers(graph: GraphView, node: Node, table_paths: dict[str, str]) -> Iterator[MatchOutcome]:
    """Replaces the products that read the weight which the DequantizeLinear gives, and what else reads its floats."""
    dtype, weight = graph.program.tensors[node.inputs[0]].dtype, IntegerWeight.from_dequantize_linear(graph, node)
    readers = graph.consumers(node.outputs[0])
    products = [product for reader in readers if (product := _match_product(graph, reader, node.outputs[0]))]
    float_reader_count = len(readers) - len(products)
    for product in products:
        blocks = weight.as_blocks(product.is_input_major) if weight else "its scale or zero point is no constant"
        if isinstance(blocks, str):
            yield SkippedMatch(product.node, blocks)
            float_reader_count += 1
            continue
        table_path = table_paths.get(node.inputs[0])
        if table_path and not product.is_input_major and not product.bias:
            yield replace_with_tied_head(product.node, product.x, table_path)
            continue
        # A layer in floats has no scales, so it cannot stand where the file's are.
        path = layer_path(graph, node.inputs[0], *(node.inputs[1:] if blocks.group_size else ()))
        block_product = BlockProduct(product.node, product.x, blocks, product.bias, len(products) == 1)
        yield replace_with_quantized_linear(graph, path, block_product)
    if float_reader_count and dtype not in ("int32", *PACKABLE_DTYPES):
        yield SkippedMatch(node, f"the weight is {dtype}; expected integers of at most 8 bits, or int32")
    elif float_reader_count and weight is not None:
        name = f"{node.outputs[0]}.floats"
        yield Replacement(node, (), aliases={node.outputs[0]: name}, tensors={name: weight.dequantize()})


def _match_product(graph: GraphView, reader: Node, floats: str) -> LinearProduct | None:
    """The product that reads the weight `floats` in the node, or in the only node behind it where it is a Transpose."""
    node = graph.only_consumer(reader.outputs[0]) if is_op_type(reader, "Transpose") else reader
    product = match_linear_product(graph, node) if node is not None else None
    if product is None or product.matrix != floats or product.x == floats:
        return None
    return product if not product.bias or graph.weight(product.bias) is not None else None


def _replace_embedding(graph: GraphView, node: Node) -> tuple[str, Replacement] | None:
    """The weight in integers of which the node gives rows in floats, and the layer in place of it."""
    if is_op_type(node, "Gather") and (dequantize := graph.producer(node.inputs[0], "DequantizeLinear")) is not None:
        gather, values = node, dequantize.inputs[0]
        weight = IntegerWeight.from_dequantize_linear(graph, dequantize)
    elif is_op_type(node, "DequantizeLinear") and (gathered := graph.producer(node.inputs[0], "Gather")) is not None:
        gather, dequantize, values = gathered, node, gathered.inputs[0]
        scale, zero_point = [*node.inputs[1:], ""][:2]
        weight = IntegerWeight.from_names(graph, (values, scale, zero_point), axis=0)
        if weight is None or weight.scale.size != 1:
            return None
    else:
        return None
    if weight is None or len(weight.values.shape) != 2 or gather.attrs.get("axis", 0) != 0:
        return None
    blocks = weight.as_blocks(is_input_major=False)
    if isinstance(blocks, str) or blocks.group_size is None or blocks.padding_columns:
        return None
    path = layer_path(graph, values, *dequantize.inputs[1:])
    return values, replace_with_quantized_embedding(node, gather.inputs[1], path, blocks)
