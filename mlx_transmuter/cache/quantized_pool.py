"""Packing: vectors in 8 or 4 bits an element, each one row of a pool as any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.index import CacheIndex

KV_BITS, KV_GROUP_SIZES = (4, 8), (32, 64, 128)


@dataclass(frozen=True)
class QuantizedFormat:
    """How a vector of `dim` elements of a dtype becomes a row of 32-bit words.

    The row is what mx.quantize makes of it in groups of group_size: the packed elements, then the groups' scales, then
    their biases (float16 for float16, else float32). An element is off by at most about its group's range / (2^bits -
    1). So a pool is one array as without it, and is written in place, copied, shared
    and saved as one. A row of zeros is a vector of zeros. `of` chooses the group.
    """

    bits: int
    group_size: int
    dim: int
    dtype: mx.Dtype

    @classmethod
    def choose(cls, bits: int, group_size: int, dim: int, dtype: mx.Dtype) -> QuantizedFormat:
        """The packing in the largest group up to group_size that divides dim, else in groups of 32, the last filled up.

        Raises CacheError for bits other than 4 and 8, or a group_size other than 32, 64 and 128.
        """
        if bits not in KV_BITS:
            raise CacheError("kv_bits", repr(bits), f"one of {KV_BITS}, or None")
        if group_size not in KV_GROUP_SIZES:
            raise CacheError("kv_group_size", repr(group_size), f"one of {KV_GROUP_SIZES}")
        fitting = [size for size in KV_GROUP_SIZES if size <= group_size and dim % size == 0]
        return cls(bits, max(fitting, default=min(KV_GROUP_SIZES)), dim, dtype)

    @property
    def width(self) -> int:
        """The words of a row."""
        return self._num_words + 2 * self._num_groups * self._scale_dtype.size // 4

    def quantize(self, values: mx.array) -> mx.array:
        """values [..., dim] as rows, uint32 [..., width]."""
        values = values.astype(self._scale_dtype)
        if fill := self._num_groups * self.group_size - self.dim:  # with what is there: the group keeps its range
            last = values[..., -1:]
            values = mx.concatenate([values, mx.broadcast_to(last, (*last.shape[:-1], fill))], axis=-1)
        words, scales, biases = mx.quantize(values, group_size=self.group_size, bits=self.bits)
        return mx.concatenate([words, mx.concatenate([scales, biases], axis=-1).view(mx.uint32)], axis=-1)

    def dequantize(self, rows: mx.array) -> mx.array:
        """rows uint32 [..., width] as values, [..., dim]."""
        words, scales, biases = self.matmul_operands(rows)
        values = mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)
        return values[..., : self.dim].astype(self.dtype)

    def matmul_operands(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """rows uint32 [..., width] as mx.quantized_matmul takes them: words, scales and biases, [..., n] each."""
        words, rest = rows[..., : self._num_words], mx.contiguous(rows[..., self._num_words :]).view(self._scale_dtype)
        return words, rest[..., : self._num_groups], rest[..., self._num_groups :]

    @property
    def _num_groups(self) -> int:
        return -(-self.dim // self.group_size)

    @property
    def _num_words(self) -> int:
        return self._num_groups * self.group_size * self.bits // 32

    @property
    def _scale_dtype(self) -> mx.Dtype:
        # In bfloat16 a scale is too coarse for 255 steps of it.
        return mx.float16 if self.dtype == mx.float16 else mx.float32


class QuantizedPool(NamedTuple):
    """A pool of packed rows, for a layer that stores and reads vectors."""

    rows: mx.array
    format: QuantizedFormat

    def extend(
        self, index: CacheIndex, values: mx.array, *, zero_unseen: bool = True
    ) -> tuple[mx.array, QuantizedPool]:
        """CacheIndex.extend of values [batch, seq, dim]; what is seen are the values as they were packed."""
        seen, pool = self.extend_quantized(index, values, zero_unseen=zero_unseen)
        return self.format.dequantize(seen.rows), pool

    def extend_quantized(
        self, index: CacheIndex, values: mx.array, *, zero_unseen: bool = True
    ) -> tuple[QuantizedPool, QuantizedPool]:
        """The same, and what is seen stays packed: its rows are [batch, context, width]."""
        seen, rows = index.extend(self.format.quantize(values), self.rows, zero_unseen=zero_unseen)
        return QuantizedPool(seen, self.format), QuantizedPool(rows, self.format)
