"""Weights in few bits as MLX's quantised layers have them, without a digit lost.

A file's value is (q - zero) · scale, MLX's q · scale + bias; with bias = -zero · scale they are the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from converters.match import Become, Graph, is_kind
from converters.tensors import Tensor, parts
from mlx_transmuter import ops
from mlx_transmuter.ops.microsoft_blocks import GROUPS
from mlx_transmuter.program import Node

# The widths that files have and MLX too.
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Blocks:
    """A weight [rows, columns] in blocks of `block` columns, the last of which may be cut short.

    bits: of a value. dtype: the float type that the file computes in. read: gives the values, uint8 [rows, columns]
    from 0 to 2^bits - 1, scales and zero points, both floats [rows, blocks].
    """

    rows: int
    columns: int
    block: int
    bits: int
    dtype: str
    read: Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]

    @property
    def group(self) -> int | None:
        """The largest of MLX's groups that blocks are made of, one that needs no more columns before one that does."""
        fits = [size for size in GROUPS if self.block % size == 0 or self.block >= self.columns]
        return next((size for size in fits if self.columns % size == 0), fits[-1] if fits else None)

    @property
    def pad(self) -> int:
        """The columns of zeros that fill the last group."""
        return -self.columns % self.group if self.group else 0

    @property
    def scales(self) -> str:
        """The type of MLX's scales. bfloat16 has too few digits for them: an 8-bit weight would move by two steps."""
        return "float16" if self.dtype == "float16" else "float32"


def become(graph: Graph, node: Node, x: str, path: str, made: Blocks, bias: str = "", alone: bool = True) -> Become:
    """The product of x with the transposed weight, plus bias, as mlx.linear with an nn.QuantizedLinear at `path`.

    alone: whether no other node reads the weight; an Add of a bias after the node then goes into the layer. A weight
    whose blocks MLX has no groups of becomes an nn.Linear in the file's float type.
    """
    root = node
    if not bias and alone:
        root, bias = bias_after(graph, node, made.rows)
    arrays, options = arrays_of(path, made)
    if bias:
        arrays[f"{path}.bias"] = graph.program.arrays[bias]
    attrs = {"pad": made.pad} if made.pad and made.group else {}
    kind = "QuantizedLinear" if made.group else "Linear"
    nodes = typed(Node("mlx.linear", (x, path), root.outputs, attrs, node.name), made)
    return Become(root, nodes, layers={path: {"kind": kind, "bias": bool(bias), **options}}, arrays=arrays)


def typed(node: Node, made: Blocks) -> tuple[Node, ...]:
    """The layer's node, and a cast to the file's type where its scales are of another one."""
    if not made.group or made.scales == made.dtype:
        return (node,)
    wide = f"{node.outputs[0]}.wide"
    to = {"to": ops.CODES[made.dtype]}
    return Node(node.op, node.inputs, (wide,), node.attrs, node.name), Node("Cast-9", (wide,), node.outputs, to)


def bias_after(graph: Graph, node: Node, rows: int) -> tuple[Node, str]:
    """The Add of a bias [rows] that alone reads the product, and the bias; or the product and ""."""
    after = graph.only_consumer(node.outputs[0])
    if after is not None and is_kind(after, "Add"):
        other = [name for name in after.inputs if name != node.outputs[0]]
        tensor = graph.weight(other[0]) if other else None
        if tensor is not None and tensor.shape == (rows,) and tensor.dtype.startswith(("float", "bfloat")):
            return after, other[0]
    return node, ""


def arrays_of(path: str, made: Blocks) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The layer's arrays, read when they are saved, and its options: weight uint32 [rows, columns · bits / 32], scales
    and biases [rows, groups]; or the weight in floats [rows, columns] where there is no group.
    """
    group, rows = made.group, made.rows
    if group is None:
        return {f"{path}.weight": Tensor(made.dtype, (rows, made.columns), lambda: _floats(made))}, {}
    columns = made.columns + made.pad

    def make() -> tuple[mx.array, ...]:
        values, scales, zeros = made.read()
        values = np.pad(values, ((0, 0), (0, made.pad)))
        at = np.minimum(np.arange(0, columns, group) // made.block, scales.shape[1] - 1)
        scales, zeros = scales[:, at].astype(np.float32), zeros[:, at].astype(np.float32)
        kind = np.dtype(made.scales)
        return tuple(map(mx.array, (_packed(values, made.bits), scales.astype(kind), (-zeros * scales).astype(kind))))

    weight, scales, biases = parts(make, 3)
    groups = (rows, columns // group)
    arrays = {
        f"{path}.weight": Tensor("uint32", (rows, columns * made.bits // 32), weight),
        f"{path}.scales": Tensor(made.scales, groups, scales),
        f"{path}.biases": Tensor(made.scales, groups, biases),
    }
    return arrays, {"bits": made.bits, "group_size": group}


def _floats(made: Blocks) -> np.ndarray:
    values, scales, zeros = made.read()
    at = np.minimum(np.arange(made.columns) // made.block, scales.shape[1] - 1)
    floats = (values.astype(np.float32) - zeros[:, at].astype(np.float32)) * scales[:, at].astype(np.float32)
    return floats.astype(np.dtype(made.dtype))


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
    """The values, uint8 [rows, columns], in rows of uint32, the lowest bits first."""
    many = 8 // bits
    lanes = values.reshape(len(values), -1, many)
    packed = lanes[..., 0].copy()
    for i in range(1, many):
        packed |= lanes[..., i] << (bits * i)
    return np.ascontiguousarray(packed).view(np.uint32)


def unpacked(packed: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """The first `columns` values of each row of bytes, the lowest bits first: uint8 [rows, columns]."""
    packed = np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), -1)
    if bits == 8:
        return packed[:, :columns]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)[:, :columns]


def blocks_of(columns: int, block: int) -> int:
    return math.ceil(columns / block)
