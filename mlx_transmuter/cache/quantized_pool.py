"""Quantized pools: vectors in 8 or 4 bits an element, each one row of a pool like any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.index import CacheIndex
from mlx_transmuter.cache.layout import ceil_div
from mlx_transmuter.errors import shorten

KV_BITS, KV_GROUP_SIZES = (4, 8), (32, 64, 128)


def check_quantization(bits: Any, group_size: Any) -> None:
    """Raises CacheError unless keys and values can have that many bits (None: not quantized) in groups of that size."""
    bits_fit = bits is None or (isinstance(bits, int) and bits in KV_BITS)
    if not bits_fit or not isinstance(group_size, int) or group_size not in KV_GROUP_SIZES:
        found = f"{shorten(bits)} bits in groups of {shorten(group_size)}"
        raise CacheError("kv_bits, kv_group_size", found, "4 or 8 bits, or None, in groups of 32, 64 or 128")


@dataclass(frozen=True)
class QuantizedFormat:
    """How a vector of `dim` elements of a dtype is stored as a row of 32-bit words.

    The row is the result of mx.quantize in groups of group_size: the quantized elements, then the groups' scales, then
    their biases (float16 for float16, else float32). The error of an element is at most about its group's range /
    (2^bits - 1). So a pool is one array as without quantization, and is written in place, copied, shared and saved as
    one. A row of zeros is a vector of zeros. `choose` picks the group size.
    """

    bits: int
    group_size: int
    dim: int
    dtype: mx.Dtype

    @classmethod
    def choose(cls, bits: int, group_size: int, dim: int, dtype: mx.Dtype) -> QuantizedFormat:
        """The format with the largest group size up to group_size that divides dim, else with groups of 32, of which
        the last is padded.

        Raises CacheError for bits other than 4 and 8, or a group_size other than 32, 64 and 128.
        """
        check_quantization(bits, group_size)
        dividing = [size for size in KV_GROUP_SIZES if size <= group_size and dim % size == 0]
        return cls(bits, max(dividing, default=min(KV_GROUP_SIZES)), dim, dtype)

    @property
    def width(self) -> int:
        """The words of a row."""
        return self._num_words + 2 * self._num_groups * self._scale_dtype.size // 4

    def quantize(self, values: mx.array) -> mx.array:
        """Returns values [..., dim] as rows, uint32 [..., width]."""
        values = values.astype(self._scale_dtype)
        if padding := self._num_groups * self.group_size - self.dim:
            last = values[..., -1:]  # repeated as padding, so that the group's range stays the same
            values = mx.concatenate([values, mx.broadcast_to(last, (*last.shape[:-1], padding))], axis=-1)
        words, scales, biases = mx.quantize(values, group_size=self.group_size, bits=self.bits)
        return mx.concatenate([words, mx.concatenate([scales, biases], axis=-1).view(mx.uint32)], axis=-1)

    def dequantize(self, rows: mx.array) -> mx.array:
        """Returns rows uint32 [..., width] as values, [..., dim]."""
        words, scales, biases = self.matmul_operands(rows)
        values = mx.dequantize(words, scales, biases, group_size=self.group_size, bits=self.bits)
        return values[..., : self.dim].astype(self.dtype)

    def matmul_operands(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Returns rows uint32 [..., width] as mx.quantized_matmul takes them: words, scales, biases, [..., n] each."""
        words, rest = rows[..., : self._num_words], mx.contiguous(rows[..., self._num_words :]).view(self._scale_dtype)
        return words, rest[..., : self._num_groups], rest[..., self._num_groups :]

    @property
    def _num_groups(self) -> int:
        return ceil_div(self.dim, self.group_size)

    @property
    def _num_words(self) -> int:
        return self._num_groups * self.group_size * self.bits // 32

    @property
    def _scale_dtype(self) -> mx.Dtype:
        # bfloat16 is too coarse for a scale of which an element is up to 255 steps.
        return mx.float16 if self.dtype == mx.float16 else mx.float32


class QuantizedPool(NamedTuple):
    """A pool of quantized rows, for a layer that stores and reads vectors."""

    rows: mx.array
    format: QuantizedFormat

    def extend(
        self, index: CacheIndex, values: mx.array, *, zero_unseen: bool = True
    ) -> tuple[mx.array, QuantizedPool]:
        """CacheIndex.extend of values [batch, seq, dim]; seen has the values as quantized and dequantized again."""
        seen, pool = self.extend_quantized(index, values, zero_unseen=zero_unseen)
        return self.format.dequantize(seen.rows), pool

    def extend_quantized(
        self, index: CacheIndex, values: mx.array, *, zero_unseen: bool = True
    ) -> tuple[QuantizedPool, QuantizedPool]:
        """extend whose seen stays quantized: its rows are uint32 [batch, context, width]."""
        seen, rows = index.extend(self.format.quantize(values), self.rows, zero_unseen=zero_unseen)
        return QuantizedPool(seen, self.format), QuantizedPool(rows, self.format)
