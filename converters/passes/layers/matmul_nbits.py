"""Quantized: weights in blocks of 2, 4 or 8 bits become MLX's quantised layers, without ever becoming floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, SkippedMatch
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.passes.layers.linear import layer_names
from mlx_transmuter.converters.passes.layers.quantized_blocks import (
    LAYER_BITS,
    BlockQuantizedWeight,
    block_count,
    build_layer_arrays,
    cast_to_file_dtype,
    replace_with_linear,
    unpack_bits,
)
from mlx_transmuter.ops.functional.block_quantization import AFFINE_GROUP_SIZES
from mlx_transmuter.program import Node


def make_block_quantized_layers(graph: GraphView) -> Iterator[MatchOutcome]:
    """MatMulNBits(x, W) [+ b] → mlx.linear with an nn.QuantizedLinear; GatherBlockQuantized(W, ids) → mlx.embedding
    with an nn.QuantizedEmbedding. A product whose blocks MLX has no groups of gets its weight in floats.
    """
    tables: dict[str, str] = {}  # the name of the weight of an embedding -> its layer's path
    for node in graph.nodes:
        if is_op_type(node, "com.microsoft.GatherBlockQuantized"):
            answer = _replace_gather_block_quantized(graph, node)
            if isinstance(answer, Replacement):
                tables[_without_reshape(graph, node.inputs[0])] = next(iter(answer.layers))
            yield answer
    for node in graph.nodes:
        if is_op_type(node, "com.microsoft.MatMulNBits"):
            if (table := tables.get(node.inputs[1])) and not any(node.inputs[4:]):
                yield Replacement(node, (Node("mlx.as_linear", (node.inputs[0], table), node.outputs, name=node.name),))
            else:
                yield from _replace_matmul_nbits(graph, node)


def _without_reshape(graph: GraphView, name: str) -> str:
    """The weight that the value is, or is another shape of, as a head's is where its embedding reads it too."""
    node = graph.producer(name, "Reshape")
    return node.inputs[0] if node is not None and node.inputs[0] in graph.program.tensors else name


def _replace_matmul_nbits(graph: GraphView, node: Node) -> Iterator[MatchOutcome]:
    inputs = [*node.inputs, *[""] * (6 - len(node.inputs))]
    name, scales, zeros, order, bias = inputs[1:6]
    rows, columns = int(node.attrs["N"]), int(node.attrs["K"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    own = [value for value in (scales, zeros, order, bias) if value]
    if problem := _unsupported_reason(graph, bits, [name, *[value for value in own if value != order]]):
        yield SkippedMatch(node, problem)
        return
    if node.attrs.get("weight_prepacked", 0):
        yield SkippedMatch(node, "it is packed for another machine")
        return
    if bias and graph.program.tensors[bias].shape != (rows,):
        yield SkippedMatch(node, "its bias is no weight of rank 1")
        return
    made = _block_weight(graph, (name, scales, zeros), rows, columns, block, bits)
    x = node.inputs[0]
    turn: np.ndarray | None = None
    if order:
        index = _column_blocks(graph, order, columns)
        if index is None:
            yield SkippedMatch(node, "the order of its columns is no constant")
            return
        made, turn = _reorder_columns(made, index)
    if made.group_size is None:
        reason = f"MLX has no groups for its blocks of {block}{' in this order' if order else ''}"
        yield SkippedMatch(node, f"{reason}: its weight is in {made.file_dtype} now")
    # A layer in floats has no scales, so it cannot stand where the file's are.
    path, _, _ = layer_names(graph, name, *(own if made.group_size else ()))
    before: tuple[Node, ...] = ()
    extra: dict[str, LazyTensor] = {}
    if turn is not None:
        x, place = f"{node.outputs[0]}.ordered", f"{path}_order"
        before = (Node("Gather-1", (node.inputs[0], place), (x,), {"axis": -1}),)
        extra[place] = LazyTensor("int32", turn.shape, lambda: turn)
    found = replace_with_linear(graph, node, x, path, made, bias, is_only_reader=len(graph.consumers(name)) == 1)
    yield Replacement(found.root, (*before, *found.nodes), layers=found.layers, arrays=found.arrays | extra)


def _block_weight(
    graph: GraphView, names: tuple[str, str, str], rows: int, columns: int, block_size: int, bits: int
) -> BlockQuantizedWeight:
    """The weight of these names (values, scales, zero points) as com.microsoft packs it."""
    packed, scales, zeros = (graph.program.tensors.get(name) for name in names)
    assert packed is not None
    assert scales is not None
    count = block_count(columns, block_size)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = scales.read().reshape(rows, count)
        if zeros is None:
            zero = np.full((rows, count), 1 << (bits - 1), np.float32)
        elif zeros.dtype == "uint8":
            zero = unpack_bits(zeros.read().reshape(rows, -1), bits, count)
        else:
            zero = zeros.read().reshape(rows, count)
        return unpack_bits(packed.read().reshape(rows, -1), bits, columns), scale, zero

    return BlockQuantizedWeight(rows, columns, block_size, bits, scales.dtype, read)


def _reorder_columns(
    block_weight: BlockQuantizedWeight, column_blocks: np.ndarray
) -> tuple[BlockQuantizedWeight, np.ndarray | None]:
    """The weight whose columns are of the blocks `index`, and the order in which it takes its input (None: as they
    come). Columns that are whole blocks in another order are put in the blocks' order; others get the scale of
    their block each.
    """
    sizes = np.bincount(column_blocks, minlength=block_count(block_weight.columns, block_weight.block_size))
    turn = np.argsort(column_blocks, kind="stable").astype(np.int32)
    if np.array_equal(column_blocks, np.arange(block_weight.columns) // block_weight.block_size):
        return block_weight, None
    whole = (
        len(sizes) == block_count(block_weight.columns, block_weight.block_size)
        and (sizes[:-1] == block_weight.block_size).all()
    )

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, scales, zeros = block_weight.read()
        return (
            (values[:, turn], scales, zeros) if whole else (values, scales[:, column_blocks], zeros[:, column_blocks])
        )

    block = block_weight.block_size if whole else 1
    turned = BlockQuantizedWeight(
        block_weight.rows, block_weight.columns, block, block_weight.bits, block_weight.file_dtype, read
    )
    return turned, (turn if whole else None)


def _column_blocks(graph: GraphView, name: str, columns: int) -> np.ndarray | None:
    """Each column's block, int [columns], or None where it is no constant."""
    tensor, constant = graph.weight(name), graph.constant(name)
    index = tensor.read() if tensor is not None else constant
    return None if index is None or index.size < columns else index.reshape(-1)[:columns].astype(np.int64)


def _replace_gather_block_quantized(graph: GraphView, node: Node) -> MatchOutcome:
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    names = [_without_reshape(graph, name) if name else "" for name in (node.inputs[0], *node.inputs[2:4])]
    name, scales, zeros = [*names, ""][:3]
    table = graph.weight(name)
    if table is None or table.dtype != "uint8" or len(table.shape) < 2:
        return SkippedMatch(node, f"the table is {table.dtype if table else 'no weight'}; wanted packed bytes")
    rows, columns = table.shape[0], table.size // table.shape[0] * 8 // bits
    if problem := _unsupported_reason(graph, bits, [name, scales, *([zeros] if zeros else [])]):
        return SkippedMatch(node, problem)
    if not any(block % size == 0 and columns % size == 0 for size in AFFINE_GROUP_SIZES):
        return SkippedMatch(node, f"its blocks are of {block}; MLX has groups of 32, 64 and 128, so it stays as it is")
    if node.attrs.get("gather_axis", 0) != 0 or node.attrs.get("quantize_axis", 1) % 2 != 1:
        return SkippedMatch(node, "it gathers or quantises along another axis")
    if graph.program.tensors[scales].size != rows * block_count(columns, block):
        return SkippedMatch(node, "its table is not packed")
    made = _block_weight(graph, (name, scales, zeros), rows, columns, block, bits)
    path, _, _ = layer_names(graph, name, *[value for value in (scales, zeros) if value])
    arrays, options = build_layer_arrays(path, made)
    nodes = cast_to_file_dtype(Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name), made)
    return Replacement(node, nodes, layers={path: {"kind": "QuantizedEmbedding", **options}}, arrays=arrays)


def _unsupported_reason(graph: GraphView, bits: int, names: list[str]) -> str | None:
    """Why the weight of these names stays in the file's form, or None."""
    if bits not in LAYER_BITS:
        return f"it has {bits} bits; wanted 2, 4 or 8"
    return "its weight is no constant" if any(graph.weight(name) is None for name in names) else None
