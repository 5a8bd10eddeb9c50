"""Weights in blocks of 2, 4 or 8 bits, as com.microsoft packs them, become MLX's quantized layers.

MatMulNBits and GatherBlockQuantized: the weights of 4-bit exports. They are repacked, and never become floats where MLX
has groups for their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.linear_layers import replace_with_tied_head
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    LAYER_BITS,
    BlockProduct,
    BlockQuantizedWeight,
    block_count,
    read_zero_points,
    replace_with_quantized_embedding,
    replace_with_quantized_linear,
    unpack_bits,
)
from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.ops.functional.block_quantization import AFFINE_GROUP_SIZES
from mlx_transmuter.program import Node


class _PackedBlocks(NamedTuple):
    """A weight [rows, columns] as com.microsoft packs it: the names of its arrays, "" for no zero points; its sizes."""

    values: str
    scales: str
    zeros: str
    rows: int
    columns: int
    block_size: int
    bits: int

    @property
    def scale_arrays(self) -> list[str]:
        return [name for name in (self.scales, self.zeros) if name]


def lower_matmul_nbits(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMulNBits(x, W) [+ b] → mlx.linear with an nn.QuantizedLinear; GatherBlockQuantized(W, ids) → mlx.embedding
    with an nn.QuantizedEmbedding. A product whose blocks MLX has no groups for gets its weight in floats.
    """
    table_paths: dict[str, str] = {}  # the name of an embedding's weight -> the path of its layer
    for node in graph.nodes:
        if is_op_type(node, "com.microsoft.GatherBlockQuantized"):
            outcome = _replace_gather_block_quantized(graph, node)
            if isinstance(outcome, Replacement):
                table_paths[_strip_reshape(graph, node.inputs[0])] = next(iter(outcome.layers))
            yield outcome
    for node in graph.nodes:
        if is_op_type(node, "com.microsoft.MatMulNBits"):
            table_path = table_paths.get(node.inputs[1])
            if table_path and not any(node.inputs[4:]):
                yield replace_with_tied_head(node, node.inputs[0], table_path)
            else:
                yield from _replace_matmul_nbits(graph, node)


def _strip_reshape(graph: GraphView, name: str) -> str:
    """The weight that the value is, or is another shape of, as a head's is where its embedding reads it too."""
    node = graph.producer(name, "Reshape")
    return node.inputs[0] if node is not None and node.inputs[0] in graph.program.tensors else name


def _replace_matmul_nbits(graph: GraphView, node: Node) -> Iterator[MatchOutcome]:
    inputs, blocks = bind_inputs(node), _matmul_nbits_weight(node)
    reason = _unsupported_reason(graph, blocks) or _unsupported_product_reason(graph, node, blocks)
    if reason is not None:
        yield SkippedMatch(node, reason)
        return
    weight, order = _read_packed_blocks(graph, blocks), None
    if "g_idx" in inputs:
        column_blocks = _read_column_blocks(graph, inputs["g_idx"], blocks.columns)
        assert column_blocks is not None
        weight, order = _reorder_columns(weight, column_blocks)
    if weight.group_size is None:
        in_order = " in this order" if "g_idx" in inputs else ""
        reason = f"MLX has no groups for its blocks of {blocks.block_size}{in_order}"
        yield SkippedMatch(node, f"{reason}: its weight is in {weight.file_dtype} now")
    # A layer in floats has no scales, so it cannot stand where the file's are.
    other_arrays = [*blocks.scale_arrays, *(inputs[name] for name in ("g_idx", "bias") if name in inputs)]
    path = layer_path(graph, blocks.values, *(other_arrays if weight.group_size else ()))
    is_only_reader = len(graph.consumers(blocks.values)) == 1
    product = BlockProduct(node, inputs["a"], weight, inputs.get("bias", ""), is_only_reader)
    if order is None:
        yield replace_with_quantized_linear(graph, path, product)
    else:
        yield _with_reordered_input(graph, path, product, order)


def _with_reordered_input(graph: GraphView, path: str, product: BlockProduct, order: np.ndarray) -> Replacement:
    """The product as a layer that takes the columns of x in that order, int32 [columns]."""
    ordered, order_name = f"{product.node.outputs[0]}.ordered", f"{path}_order"
    linear = replace_with_quantized_linear(graph, path, product._replace(x=ordered))
    gather = Node("Gather-1", (product.x, order_name), (ordered,), {"axis": -1})
    tensors = linear.tensors | {order_name: LazyTensor("int32", order.shape, lambda: order)}
    return replace(linear, nodes=(gather, *linear.nodes), tensors=tensors)


def _matmul_nbits_weight(node: Node) -> _PackedBlocks:
    inputs, bits = bind_inputs(node), int(node.attrs.get("bits", 4))
    rows, columns, block_size = (int(node.attrs[name]) for name in ("N", "K", "block_size"))
    values, scales, zeros = (inputs.get(name, "") for name in ("b", "scales", "zero_points"))
    return _PackedBlocks(values, scales, zeros, rows, columns, block_size, bits)


def _unsupported_product_reason(graph: GraphView, node: Node, blocks: _PackedBlocks) -> str | None:
    """Why a MatMulNBits whose weight fits a layer is left unchanged, or None."""
    inputs = bind_inputs(node)
    if node.attrs.get("weight_prepacked", 0):
        return "it is packed for another machine"
    bias = graph.weight(inputs["bias"]) if "bias" in inputs else None
    if "bias" in inputs and (bias is None or bias.shape != (blocks.rows,)):
        return "its bias is no weight of rank 1"
    if "g_idx" in inputs and _read_column_blocks(graph, inputs["g_idx"], blocks.columns) is None:
        return "the order of its columns is no constant"
    return None


def _read_packed_blocks(graph: GraphView, packed: _PackedBlocks) -> BlockQuantizedWeight:
    values, scales = graph.program.tensors[packed.values], graph.program.tensors[packed.scales]
    zeros = graph.weight(packed.zeros)
    rows, columns, bits = packed.rows, packed.columns, packed.bits
    blocks = block_count(columns, packed.block_size)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        unpacked = unpack_bits(values.read().reshape(rows, -1), bits, columns)
        return unpacked, scales.read().reshape(rows, blocks), read_zero_points(zeros, rows, blocks, bits)

    return BlockQuantizedWeight(rows, columns, packed.block_size, bits, scales.dtype, read)


def _reorder_columns(
    weight: BlockQuantizedWeight, blocks_of_columns: np.ndarray
) -> tuple[BlockQuantizedWeight, np.ndarray | None]:
    """The weight whose columns belong to these blocks, and the order in which it takes its input, int32 [columns]; None
    for the order that the input has.

    Columns that fill whole blocks are sorted by block; otherwise each column gets the scale of its block.
    """
    blocks, block_size = block_count(weight.columns, weight.block_size), weight.block_size
    if np.array_equal(blocks_of_columns, np.arange(weight.columns) // block_size):
        return weight, None
    sizes = np.bincount(blocks_of_columns, minlength=blocks)
    fills_blocks = len(sizes) == blocks and (sizes[:-1] == block_size).all()
    order = np.argsort(blocks_of_columns, kind="stable").astype(np.int32)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, scales, zeros = weight.read()
        if fills_blocks:
            return values[:, order], scales, zeros
        return values, scales[:, blocks_of_columns], zeros[:, blocks_of_columns]

    reordered = replace(weight, block_size=block_size if fills_blocks else 1, read=read)
    return reordered, order if fills_blocks else None


def _read_column_blocks(graph: GraphView, name: str, columns: int) -> np.ndarray | None:
    """Each column's block, int64 [columns], or None where it is no constant."""
    blocks = graph.array(name)
    return None if blocks is None or blocks.size < columns else blocks.reshape(-1)[:columns].astype(np.int64)


def _replace_gather_block_quantized(graph: GraphView, node: Node) -> MatchOutcome:
    inputs = bind_inputs(node)
    values, scales, zeros = (_strip_reshape(graph, inputs.get(name, "")) for name in ("data", "scales", "zero_points"))
    bits, block_size = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    table = graph.weight(values)
    if table is None or table.dtype != "uint8" or len(table.shape) < 2:
        return SkippedMatch(node, f"the table is {table.dtype if table else 'no weight'}; expected packed bytes")
    rows, columns = table.shape[0], table.size // table.shape[0] * 8 // bits
    packed = _PackedBlocks(values, scales, zeros, rows, columns, block_size, bits)
    if reason := _unsupported_reason(graph, packed):
        return SkippedMatch(node, reason)
    if not any(block_size % size == 0 and columns % size == 0 for size in AFFINE_GROUP_SIZES):
        return SkippedMatch(
            node, f"its blocks are of {block_size}; MLX has groups of 32, 64 and 128, so it stays as it is"
        )
    if node.attrs.get("gather_axis", 0) != 0 or node.attrs.get("quantize_axis", 1) % 2 != 1:
        return SkippedMatch(node, "it gathers or quantizes along another axis")
    if graph.program.tensors[scales].size != rows * block_count(columns, block_size):
        return SkippedMatch(node, "its scales are not as many as its blocks")
    path = layer_path(graph, values, *packed.scale_arrays)
    return replace_with_quantized_embedding(node, inputs["indices"], path, _read_packed_blocks(graph, packed))


def _unsupported_reason(graph: GraphView, packed: _PackedBlocks) -> str | None:
    """Why the weight is left unchanged, or None."""
    if packed.bits not in LAYER_BITS:
        return f"it has {packed.bits} bits; expected 2, 4 or 8"
    is_constant = all(graph.weight(name) is not None for name in (packed.values, *packed.scale_arrays))
    return None if is_constant else "its weight is no constant"
