"""Quantized: weights in blocks of 4 or 8 bits become MLX's quantised layers, without ever becoming floats.

The file's value is (q - zero) · scale, MLX's q · scale + bias; with bias = -zero · scale they are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from converters.match import Answer, Become, Declined, Graph, is_kind
from converters.passes.linear import layer_names
from converters.tensors import Tensor
from mlx_transmuter import ops
from mlx_transmuter.ops.microsoft_blocks import GROUPS, affine
from mlx_transmuter.program import Node

BITS = (2, 4, 8)


def quantized(graph: Graph) -> Iterator[Answer]:
    """MatMulNBits(x, W) [+ b] → mlx.linear with an nn.QuantizedLinear; GatherBlockQuantized(W, ids) → mlx.embedding
    with an nn.QuantizedEmbedding, whose table a head that multiplies with W reads too. Blocks of 16, which MLX has no
    form of, stay as they are."""
    tables: dict[str, str] = {}  # the name of a table -> the path of its embedding
    for node in graph.nodes:
        if is_kind(node, "com.microsoft.GatherBlockQuantized"):
            answer = _embedding(graph, node)
            if isinstance(answer, Become):
                tables[_table(graph, node)[0]] = next(iter(answer.layers))
            yield answer
    for node in graph.nodes:
        if is_kind(node, "com.microsoft.MatMulNBits"):
            yield _linear(graph, node, tables)


def _linear(graph: Graph, node: Node, tables: dict[str, str]) -> Answer:
    inputs = [*node.inputs, *[""] * (6 - len(node.inputs))]
    name, scales, zeros, order, bias = inputs[1:6]
    if name in tables and not order and not bias:
        return Become(node, (Node("mlx.as_linear", (node.inputs[0], tables[name]), node.outputs, name=node.name),))
    rows, columns = int(node.attrs["N"]), int(node.attrs["K"])
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs["block_size"])
    if problem := _problem(graph, bits, block, columns, [name, scales, *([zeros] if zeros else [])]):
        return Declined(node, problem)
    if order or node.attrs.get("weight_prepacked", 0):
        return Declined(node, "its columns are reordered")
    if bias and ((tensor := graph.weight(bias)) is None or tensor.shape != (rows,)):
        return Declined(node, "its bias is no weight of rank 1")
    own = [value for value in (scales, zeros, bias) if value]
    path, _, bias_name = layer_names(graph, name, *own)
    arrays = _arrays(graph, path, (name, scales, zeros), rows, columns, bits, block)
    if bias:
        arrays[bias_name] = graph.program.arrays[bias]
    layer = {"kind": "QuantizedLinear", "bias": bool(bias), "bits": bits, "group_size": _group(block)}
    made = Node("mlx.linear", (node.inputs[0], path), node.outputs, name=node.name)
    return Become(node, (made,), layers={path: layer}, arrays=arrays)


def _embedding(graph: Graph, node: Node) -> Answer:
    _, _, scales, *more = node.inputs
    zeros = more[0] if more else ""
    bits, block = int(node.attrs.get("bits", 4)), int(node.attrs.get("block_size", 128))
    name, shape = _table(graph, node)
    table = graph.weight(name)
    if table is None or table.dtype != "uint8" or len(shape) != 2:
        return Declined(node, f"the table is {table.dtype if table else 'no weight'}; wanted packed bytes")
    rows, columns = shape[0], shape[1] * 8 // bits
    if problem := _problem(graph, bits, block, columns, [name, scales, *([zeros] if zeros else [])]):
        return Declined(node, problem)
    if node.attrs.get("gather_axis", 0) != 0 or node.attrs.get("quantize_axis", 1) % 2 != 1:
        return Declined(node, "it gathers or quantises along another axis")
    if graph.program.arrays[scales].shape != (rows, columns // block):
        return Declined(node, "its table is not packed")
    path, _, _ = layer_names(graph, name, *[value for value in (scales, zeros) if value])
    return Become(
        node,
        (Node("mlx.embedding", (node.inputs[1], path), node.outputs, name=node.name),),
        layers={path: {"kind": "QuantizedEmbedding", "bits": bits, "group_size": _group(block)}},
        arrays=_arrays(graph, path, (name, scales, zeros), rows, columns, bits, block),
    )


def _table(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]]:
    """The table of a gather and its shape: a weight, or one of a product, [rows, blocks, bytes], laid flat."""
    flat = graph.producer(node.inputs[0], "Reshape")
    name = flat.inputs[0] if flat else node.inputs[0]
    table = graph.weight(name)
    if table is None or flat is None:
        return name, table.shape if table else ()
    shape = graph.constant(flat.inputs[1])
    rows, columns = table.shape[0], math.prod(table.shape[1:])
    return name, (rows, columns) if shape is not None and list(shape) in ([rows, columns], [rows, -1]) else ()


def _group(block: int) -> int:
    return next(size for size in GROUPS if block % size == 0)


def _problem(graph: Graph, bits: int, block: int, columns: int, names: list[str]) -> str | None:
    """Why MLX has no layer for the weight of these names, or None."""
    if bits not in BITS:
        return f"it has {bits} bits; wanted 2, 4 or 8"
    if not any(block % size == 0 for size in GROUPS):
        return f"its blocks are of {block}; MLX has groups of 32, 64 and 128, so it stays in the file's form"
    if columns % block:
        return f"its {columns} columns are no whole blocks of {block}"
    if any(graph.weight(name) is None for name in names):
        return "its weight is no constant"
    return None


def _arrays(
    graph: Graph, path: str, names: tuple[str, str, str], rows: int, columns: int, bits: int, block: int
) -> dict[str, Tensor]:
    """The layer's weight uint32 [rows, columns · bits / 32], its scales and biases [rows, groups], read when saved."""
    packed, scales, zeros = (graph.weight(name) if name else None for name in names)
    assert packed is not None
    assert scales is not None
    groups = (rows, columns // _group(block))
    blocks = columns // block
    kind = scales.dtype if scales.dtype == "float16" else "float32"

    def part(at: int):
        def read() -> np.ndarray:
            with mx.stream(mx.cpu):
                made = affine(
                    mx.array(np.ascontiguousarray(packed.read()).view(np.uint8)).reshape(rows, blocks, -1),
                    ops.to_device(np.ascontiguousarray(scales.read())).reshape(rows, blocks),
                    None if zeros is None else ops.to_device(np.ascontiguousarray(zeros.read())),
                    bits,
                    block,
                )
                assert made is not None
                return np.array(made[at])

        return read

    return {
        f"{path}.weight": Tensor("uint32", (rows, math.ceil(columns * bits / 32)), part(0)),
        f"{path}.scales": Tensor(kind, groups, part(1)),
        f"{path}.biases": Tensor(kind, groups, part(2)),
    }
