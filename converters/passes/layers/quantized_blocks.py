"""Weights in few bits as MLX's quantised layers have them, without a digit lost.

A file's value is (q - zero) · scale, MLX's q · scale + bias; with bias = -zero · scale they are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import Replacement
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor, shared_readers
from mlx_transmuter.ops.functional.block_quantization import AFFINE_GROUP_SIZES
from mlx_transmuter.program import Node

# The widths that files have and MLX too.
LAYER_BITS = (2, 4, 8)


@dataclass(frozen=True)
class BlockQuantizedWeight:
    """A weight [rows, columns] in blocks of `block` columns, the last of which may be cut short.

    bits: of a value. dtype: the float type that the file computes in. read: gives the values, uint8 [rows, columns]
    from 0 to 2^bits - 1, scales and zero points, both floats [rows, blocks].
    """

    rows: int
    columns: int
    block_size: int
    bits: int
    file_dtype: str
    read: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]

    @property
    def group_size(self) -> int | None:
        """The largest of MLX's groups that blocks are made of, one that needs no more columns before one that does."""
        fits = [size for size in AFFINE_GROUP_SIZES if self.block_size % size == 0 or self.block_size >= self.columns]
        return next((size for size in fits if self.columns % size == 0), fits[-1] if fits else None)

    @property
    def padding_columns(self) -> int:
        """The columns of zeros that fill the last group."""
        return -self.columns % self.group_size if self.group_size else 0

    @property
    def scale_dtype(self) -> str:
        """The type of MLX's scales. bfloat16 has too few digits for them: an 8-bit weight would move by two steps."""
        return "float16" if self.file_dtype == "float16" else "float32"


def replace_with_linear(
    graph: GraphView,
    node: Node,
    x: str,
    path: str,
    block_weight: BlockQuantizedWeight,
    bias: str = "",
    is_only_reader: bool = True,
) -> Replacement:
    """The product of x with the transposed weight, plus bias, as mlx.linear with an nn.QuantizedLinear at `path`.

    alone: whether no other node reads the weight; an Add of a bias after the node then goes into the layer. A weight
    whose blocks MLX has no groups of becomes an nn.Linear in the file's float type.
    """
    root = node
    if not bias and is_only_reader:
        root, bias = find_bias_add(graph, node, block_weight.rows)
    arrays, options = build_layer_arrays(path, block_weight)
    if bias:
        arrays[f"{path}.bias"] = graph.program.tensors[bias]
    attrs = {"pad": block_weight.padding_columns} if block_weight.padding_columns and block_weight.group_size else {}
    kind = "QuantizedLinear" if block_weight.group_size else "Linear"
    nodes = cast_to_file_dtype(Node("mlx.linear", (x, path), root.outputs, attrs, node.name), block_weight)
    return Replacement(root, nodes, layers={path: {"kind": kind, "bias": bool(bias), **options}}, arrays=arrays)


def cast_to_file_dtype(node: Node, block_weight: BlockQuantizedWeight) -> tuple[Node, ...]:
    """The layer's node, and a cast to the file's type where its scales are of another one."""
    if not block_weight.group_size or block_weight.scale_dtype == block_weight.file_dtype:
        return (node,)
    wide = f"{node.outputs[0]}.wide"
    to = {"to": ops.ELEMENT_TYPE_CODES[block_weight.file_dtype]}
    return Node(node.op, node.inputs, (wide,), node.attrs, node.name), Node("Cast-9", (wide,), node.outputs, to)


def find_bias_add(graph: GraphView, node: Node, rows: int) -> tuple[Node, str]:
    """The Add of a bias [rows] that alone reads the product, and the bias; or the product and ""."""
    after = graph.only_consumer(node.outputs[0])
    if after is not None and is_op_type(after, "Add"):
        other = [name for name in after.inputs if name != node.outputs[0]]
        tensor = graph.weight(other[0]) if other else None
        if tensor is not None and tensor.shape == (rows,) and tensor.dtype.startswith(("float", "bfloat")):
            return after, other[0]
    return node, ""


def build_layer_arrays(path: str, block_weight: BlockQuantizedWeight) -> tuple[dict[str, LazyTensor], dict[str, int]]:
    """The layer's arrays, read when they are saved, and its options: weight uint32 [rows, columns · bits / 32], scales
    and biases [rows, groups]; or the weight in floats [rows, columns] where there is no group.
    """
    group, rows = block_weight.group_size, block_weight.rows
    if group is None:
        return {
            f"{path}.weight": LazyTensor(
                block_weight.file_dtype, (rows, block_weight.columns), lambda: _dequantize(block_weight)
            )
        }, {}
    columns = block_weight.columns + block_weight.padding_columns

    def make() -> tuple[mx.array, ...]:
        values, scales, zeros = block_weight.read()
        values = np.pad(values, ((0, 0), (0, block_weight.padding_columns)))
        at = np.minimum(np.arange(0, columns, group) // block_weight.block_size, scales.shape[1] - 1)
        scales, zeros = scales[:, at].astype(np.float32), zeros[:, at].astype(np.float32)
        kind = np.dtype(block_weight.scale_dtype)
        return tuple(
            map(
                mx.array, (_pack_uint32(values, block_weight.bits), scales.astype(kind), (-zeros * scales).astype(kind))
            )
        )

    weight, scales, biases = shared_readers(make, 3)
    groups = (rows, columns // group)
    arrays = {
        f"{path}.weight": LazyTensor("uint32", (rows, columns * block_weight.bits // 32), weight),
        f"{path}.scales": LazyTensor(block_weight.scale_dtype, groups, scales),
        f"{path}.biases": LazyTensor(block_weight.scale_dtype, groups, biases),
    }
    return arrays, {"bits": block_weight.bits, "group_size": group}


def _dequantize(block_weight: BlockQuantizedWeight) -> np.ndarray:
    values, scales, zeros = block_weight.read()
    at = np.minimum(np.arange(block_weight.columns) // block_weight.block_size, scales.shape[1] - 1)
    floats = (values.astype(np.float32) - zeros[:, at].astype(np.float32)) * scales[:, at].astype(np.float32)
    return floats.astype(np.dtype(block_weight.file_dtype))


def _pack_uint32(values: np.ndarray, bits: int) -> np.ndarray:
    """The values, uint8 [rows, columns], in rows of uint32, the lowest bits first."""
    many = 8 // bits
    lanes = values.reshape(len(values), -1, many)
    packed = lanes[..., 0].copy()
    for i in range(1, many):
        packed |= lanes[..., i] << (bits * i)
    return np.ascontiguousarray(packed).view(np.uint32)


def unpack_bits(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The first `columns` values of each row of bytes, the lowest bits first: uint8 [rows, columns]."""
    packed = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    if bits == 8:
        return packed[:, :columns]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)[:, :columns]


def block_count(columns: int, block_size: int) -> int:
    return math.ceil(columns / block_size)
