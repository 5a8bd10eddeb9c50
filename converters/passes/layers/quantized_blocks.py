"""Weights of 2, 4 or 8 bits in blocks, and the quantized layers that hold the same numbers.

A file's value is (q - zero) · scale, MLX's q · scale + bias; with bias = -zero · scale they are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.layer_view import name_arrays
from mlx_transmuter.converters.graph.linear_product import find_bias_add
from mlx_transmuter.converters.graph.node_builder import cast_output
from mlx_transmuter.converters.graph.rewriting import Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES, LazyTensor, shared_readers
from mlx_transmuter.ops.functional.block_quantization import AFFINE_GROUP_SIZES
from mlx_transmuter.program import Node

# The widths that files have and MLX too.
LAYER_BITS = (2, 4, 8)


@dataclass(frozen=True)
class BlockQuantizedWeight:
    """A weight [rows, columns] in blocks of `block_size` columns, the last of which may be cut short.

    bits: of a value. file_dtype: the float type that the file computes in. read: gives the values, uint8 [rows,
    columns] from 0 to 2^bits - 1, scales and zero points, both floats [rows, blocks].
    """

    rows: int
    columns: int
    block_size: int
    bits: int
    file_dtype: str
    read: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]

    @property
    def group_size(self) -> int | None:
        """The largest of MLX's groups that blocks consist of, one that needs no more columns before one that does; None
        where blocks consist of no group.
        """
        fits = [size for size in AFFINE_GROUP_SIZES if self.block_size % size == 0 or self.block_size >= self.columns]
        return next((size for size in fits if self.columns % size == 0), fits[-1] if fits else None)

    @property
    def padding_columns(self) -> int:
        """The columns of zeros that fill the layer's last group."""
        return -self.columns % self.group_size if self.group_size else 0

    @property
    def scale_dtype(self) -> str:
        """The type of MLX's scales. bfloat16 has too few digits for them: an 8-bit weight would move by two steps."""
        return "float16" if self.file_dtype == "float16" else "float32"

    @property
    def output_dtype(self) -> str:
        """The float type of what the layer computes: that of its scales, or of its weight in floats."""
        return self.scale_dtype if self.group_size else self.file_dtype

    @property
    def node_attrs(self) -> dict[str, int]:
        """The attributes of a product with the layer."""
        return {"pad": self.padding_columns} if self.padding_columns else {}


class BlockProduct(NamedTuple):
    """The product of x with a transposed weight, computed by `node`.

    bias: the name of its own bias, "" for none. is_only_reader: whether no other node reads the weight; an Add of a
    bias after the node then goes into the layer.
    """

    node: Node
    x: str
    weight: BlockQuantizedWeight
    bias: str = ""
    is_only_reader: bool = True


def replace_with_quantized_linear(graph: GraphView, path: str, product: BlockProduct) -> Replacement:
    """The product, plus bias, as mlx.linear with an nn.QuantizedLinear at `path`.

    A weight whose blocks MLX has no groups for becomes an nn.Linear in the file's float type.
    """
    weight, root, bias = product.weight, product.node, product.bias
    if not bias and product.is_only_reader:
        bias_add = find_bias_add(graph, root, (weight.rows,), LAYER_FLOAT_TYPES)
        root, bias = bias_add or (root, "")
    arrays, options = build_layer_arrays(weight)
    if bias:
        arrays["bias"] = graph.program.tensors[bias]
    linear = Node("mlx.linear", (product.x, path), root.outputs, weight.node_attrs, product.node.name)
    kind = "QuantizedLinear" if weight.group_size else "Linear"
    layers = {path: {"kind": kind, "bias": bool(bias), **options}}
    return Replacement(root, _cast_to_file_dtype(linear, weight), layers=layers, tensors=name_arrays(path, arrays))


def replace_with_quantized_embedding(node: Node, ids: str, path: str, weight: BlockQuantizedWeight) -> Replacement:
    """The rows `ids` of the weight, which the node gives, as mlx.embedding with an nn.QuantizedEmbedding at `path`."""
    arrays, options = build_layer_arrays(weight)
    embedding = Node("mlx.embedding", (ids, path), node.outputs, name=node.name)
    layers = {path: {"kind": "QuantizedEmbedding", **options}}
    return Replacement(node, _cast_to_file_dtype(embedding, weight), layers=layers, tensors=name_arrays(path, arrays))


def _cast_to_file_dtype(node: Node, weight: BlockQuantizedWeight) -> tuple[Node, ...]:
    """The layer's node, and a Cast to the file's type where the layer computes in another one."""
    return (node,) if weight.output_dtype == weight.file_dtype else cast_output(node, weight.file_dtype)


def build_layer_arrays(weight: BlockQuantizedWeight) -> tuple[dict[str, LazyTensor], dict[str, int]]:
    """The arrays of the weight's layer, read when they are saved, and its options: "weight" uint32 [rows,
    columns · bits / 32], "scales" and "biases" [rows, groups]; or the "weight" in floats [rows, columns] where MLX has
    no groups for the blocks.
    """
    group_size, rows = weight.group_size, weight.rows
    if group_size is None:
        floats = LazyTensor(weight.file_dtype, (rows, weight.columns), lambda: _dequantize(weight))
        return {"weight": floats}, {}
    columns = weight.columns + weight.padding_columns

    def make() -> tuple[mx.array, ...]:
        values, scales, zeros = weight.read()
        values = np.pad(values, ((0, 0), (0, weight.padding_columns)))
        scales, zeros = _spread_blocks(weight, scales, zeros, np.arange(0, columns, group_size))
        dtype = np.dtype(weight.scale_dtype)
        packed = _pack_uint32(values, weight.bits)
        return mx.array(packed), mx.array(scales.astype(dtype)), mx.array((-zeros * scales).astype(dtype))

    packed, scales, biases = shared_readers(make, 3)
    groups = (rows, columns // group_size)
    arrays = {
        "weight": LazyTensor("uint32", (rows, columns * weight.bits // 32), packed),
        "scales": LazyTensor(weight.scale_dtype, groups, scales),
        "biases": LazyTensor(weight.scale_dtype, groups, biases),
    }
    return arrays, {"bits": weight.bits, "group_size": group_size}


def _dequantize(weight: BlockQuantizedWeight) -> np.ndarray:
    values, scales, zeros = weight.read()
    scales, zeros = _spread_blocks(weight, scales, zeros, np.arange(weight.columns))
    return ((values.astype(np.float32) - zeros) * scales).astype(np.dtype(weight.file_dtype))


def _spread_blocks(
    weight: BlockQuantizedWeight, scales: np.ndarray, zeros: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The scales and zero points of these columns, float32 [rows, columns]; padding has those of the last block."""
    blocks = np.minimum(columns // weight.block_size, scales.shape[1] - 1)
    return scales[:, blocks].astype(np.float32), zeros[:, blocks].astype(np.float32)


def _pack_uint32(values: np.ndarray, bits: int) -> np.ndarray:
    """The values, uint8 [rows, columns], in rows of uint32, the lowest bits first."""
    per_byte = 8 // bits
    bytewise = values.reshape(len(values), -1, per_byte)
    packed = bytewise[..., 0].copy()
    for i in range(1, per_byte):
        packed |= bytewise[..., i] << (bits * i)
    return np.ascontiguousarray(packed).view(np.uint32)


def unpack_bits(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The first `columns` values of each row of bytes, the lowest bits first: uint8 [rows, columns]."""
    packed = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    if bits == 8:
        return packed[:, :columns]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)[:, :columns]


def read_zero_points(zeros: LazyTensor | None, rows: int, blocks: int, bits: int) -> np.ndarray:
    """The zero points [rows, blocks] as com.microsoft stores them: packed in bytes, or floats, or 2^(bits - 1) for
    None.
    """
    if zeros is None:
        return np.full((rows, blocks), 1 << (bits - 1), np.float32)
    if zeros.dtype == "uint8":
        return unpack_bits(zeros.read().reshape(rows, -1), bits, blocks)
    return zeros.read().reshape(rows, blocks)


def block_count(columns: int, block_size: int) -> int:
    """The blocks of a row, the last one perhaps cut short."""
    return math.ceil(columns / block_size)
