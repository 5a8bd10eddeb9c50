"""Weights in blocks of 2, 4 or 8 bits, as com.microsoft packs them, become MLX's quantised layers.

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
from mlx_transmuter.converters.passes.layers.integer_weight import constant_values
from mlx_transmuter.converters.passes.layers.layer_paths import layer_path
from mlx_transmuter.converters.passes.layers.linear import replace_with_tied_head
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


def make_block_quantized_layers(graph: GraphView) -> Iterator[MatchOutcome]:
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
    x, values, scales, zeros, column_blocks, bias = (*node.inputs, *[""] * 5)[:6]
    rows, columns = int(node.attrs["N"]), int(node.attrs["K"])
    packed = _PackedBlocks(
        values, scales, zeros, rows, columns, int(node.attrs["block_size"]), int(node.attrs.get("bits", 4))
    )
    blocks_of_columns = _read_column_blocks(graph, column_blocks, columns) if column_blocks else None
    reason = _unsupported_reason(graph, packed, [bias] if bias else [])
    if reason is None and node.attrs.get("weight_prepacked", 0):
        reason = "it is packed for another machine"
    elif reason is None and bias and graph.program.tensors[bias].shape != (rows,):
        reason = "its bias is no weight of rank 1"
    elif reason is None and column_blocks and blocks_of_columns is None:
        reason = "the order of its columns is no constant"
    if reason is not None:
        yield SkippedMatch(node, reason)
        return
    weight, order = _read_packed_blocks(graph, packed), None
    if blocks_of_columns is not None:
        weight, order = _reorder_columns(weight, blocks_of_columns)
    if weight.group_size is None:
        reason = f"MLX has no groups for its blocks of {packed.block_size}{' in this order' if column_blocks else ''}"
        yield SkippedMatch(node, f"{reason}: its weight is in {weight.file_dtype} now")
    # A layer in floats has no scales, so it cannot stand where the file's are.
    other_arrays = [*packed.scale_arrays, *(name for name in (column_blocks, bias) if name)]
    path = layer_path(graph, values, *(other_arrays if weight.group_size else ()))
    is_only_reader = len(graph.consumers(values)) == 1
    if order is None:
        yield replace_with_quantized_linear(graph, path, BlockProduct(node, x, weight, bias, is_only_reader))
        return
    ordered, order_name = f"{node.outputs[0]}.ordered", f"{path}_order"
    linear = replace_with_quantized_linear(graph, path, BlockProduct(node, ordered, weight, bias, is_only_reader))
    gather = Node("Gather-1", (x, order_name), (ordered,), {"axis": -1})
    order_array = LazyTensor("int32", order.shape, lambda: order)
    yield Replacement(
        linear.root, (gather, *linear.nodes), layers=linear.layers, arrays=linear.arrays | {order_name: order_array}
    )


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
    blocks = constant_values(graph, name)
    return None if blocks is None or blocks.size < columns else blocks.reshape(-1)[:columns].astype(np.int64)


def _replace_gather_block_quantized(graph: GraphView, node: Node) -> MatchOutcome:
    names = [_strip_reshape(graph, name) if name else "" for name in (node.inputs[0], *node.inputs[2:4])]
    values, scales, zeros = (*names, "")[:3]
    bits, block_size = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    table = graph.weight(values)
    if table is None or table.dtype != "uint8" or len(table.shape) < 2:
        return SkippedMatch(node, f"the table is {table.dtype if table else 'no weight'}; expected packed bytes")
    rows, columns = table.shape[0], table.size // table.shape[0] * 8 // bits
    packed = _PackedBlocks(values, scales, zeros, rows, columns, block_size, bits)
    if reason := _unsupported_reason(graph, packed, []):
        return SkippedMatch(node, reason)
    if not any(block_size % size == 0 and columns % size == 0 for size in AFFINE_GROUP_SIZES):
        return SkippedMatch(
            node, f"its blocks are of {block_size}; MLX has groups of 32, 64 and 128, so it stays as it is"
        )
    if node.attrs.get("gather_axis", 0) != 0 or node.attrs.get("quantize_axis", 1) % 2 != 1:
        return SkippedMatch(node, "it gathers or quantises along another axis")
    if graph.program.tensors[scales].size != rows * block_count(columns, block_size):
        return SkippedMatch(node, "its table is not packed")
    path = layer_path(graph, values, *packed.scale_arrays)
    return replace_with_quantized_embedding(node, node.inputs[1], path, _read_packed_blocks(graph, packed))


def _unsupported_reason(graph: GraphView, packed: _PackedBlocks, other_weights: list[str]) -> str | None:
    """Why the weight stays in the file's form, or None."""
    if packed.bits not in LAYER_BITS:
        return f"it has {packed.bits} bits; expected 2, 4 or 8"
    names = [packed.values, packed.scales, *([packed.zeros] if packed.zeros else []), *other_weights]
    return "its weight is no constant" if any(graph.weight(name) is None for name in names) else None
