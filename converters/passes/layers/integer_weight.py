"""A weight that a file stores in integers, with the scales and zero points that turn it into floats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.tensor_protos import ELEMENT_BITS
from mlx_transmuter.converters.passes.layers.quantized_blocks import LAYER_BITS, BlockQuantizedWeight
from mlx_transmuter.program import Node

PACKABLE_DTYPES = ("int8", "uint8", "int4", "uint4", "int2", "uint2")


@dataclass(frozen=True)
class IntegerWeight:
    """The weight (values - zero_point) · scale, in scale's float type. ONNX DequantizeLinear-10 to -25.

    scale: one number; or [n], one for each index of `axis`; or, with a block size, of the values' rank, one for each
    block of so many indices of `axis`. zero_point: likewise, None for 0.
    """

    values: LazyTensor
    scale: np.ndarray
    zero_point: np.ndarray | None
    axis: int
    block_size: int = 0

    @staticmethod
    def from_names(
        graph: GraphView, names: tuple[str, str, str], axis: int, block_size: int = 0
    ) -> IntegerWeight | None:
        """The weight of these names (values, scale, zero point or ""); None where one of them is no constant."""
        values = graph.weight(names[0])
        scale, zero_point = (graph.array(name) for name in names[1:])
        if values is None or scale is None or (names[2] and zero_point is None):
            return None
        return IntegerWeight(values, scale, zero_point, axis, block_size)

    @staticmethod
    def from_dequantize_linear(graph: GraphView, node: Node) -> IntegerWeight | None:
        """The weight that a DequantizeLinear gives; None where one of its inputs is no constant."""
        values, scale, zero_point = (*node.inputs, "")[:3]
        axis, block_size = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
        return IntegerWeight.from_names(graph, (values, scale, zero_point), axis, block_size)

    def dequantize(self) -> LazyTensor:
        """The weight in floats."""
        shape = self.values.shape

        def read() -> np.ndarray:
            indices = np.arange(shape[self.axis] if self.block_size else 0)
            floats = self.values.read().astype(np.float32)
            if self.zero_point is not None:
                floats -= self._spread(self.zero_point, indices).astype(np.float32)
            return (floats * self._spread(self.scale, indices).astype(np.float32)).astype(self.scale.dtype)

        return LazyTensor(self.scale.dtype.name, shape, read)

    def as_blocks(self, is_input_major: bool) -> BlockQuantizedWeight | str:
        """The weight of a layer [rows, columns], or why a layer has no such weight.

        is_input_major: whether the values are [columns, rows].
        """
        dtype = self.values.dtype
        if dtype not in PACKABLE_DTYPES or ELEMENT_BITS[dtype] not in LAYER_BITS or len(self.values.shape) != 2:
            return f"the weight is {dtype} of rank {len(self.values.shape)}; expected 2, 4 or 8 bits and rank 2"
        rows, columns = self.values.shape[::-1] if is_input_major else self.values.shape
        column_axis = 0 if is_input_major else 1
        if self.scale.size == 1 or (not self.block_size and self.axis % 2 != column_axis):
            block = columns  # one scale for all, or one for a row
        elif self.block_size and self.axis % 2 == column_axis:
            block = self.block_size
        else:
            return "its scales are along the other axis; expected scales of rows, or of blocks along them"
        block_starts = np.arange(0, columns, max(block, 1))
        bits = ELEMENT_BITS[dtype]
        shift = 0 if dtype.startswith("u") else 1 << (bits - 1)

        def per_block(numbers: np.ndarray) -> np.ndarray:
            spread = self._spread(numbers, block_starts)
            spread = spread.T if is_input_major else spread
            return np.broadcast_to(spread, (rows, len(block_starts))).astype(np.float32)

        def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            values = self.values.read().astype(np.int16) + shift
            zero_point = np.zeros((), np.float32) if self.zero_point is None else self.zero_point
            values = values.T if is_input_major else values
            return values.astype(np.uint8), per_block(self.scale), per_block(zero_point) + shift

        return BlockQuantizedWeight(rows, columns, block, bits, self.scale.dtype.name, read)

    def _spread(self, numbers: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """The scales or zero points of these indices of `axis`, in a shape that is broadcast to the values'."""
        if numbers.size == 1:
            return numbers.reshape(())
        if self.block_size:
            return numbers.take(indices // self.block_size, self.axis)
        rank = len(self.values.shape)
        return numbers.reshape([-1 if i == self.axis % rank else 1 for i in range(rank)])
