"""Weights in few bits of com.microsoft: MatMulNBits, MatMulBnb4 and GatherBlockQuantized."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.block_quantization import (
    dequantize_blocks,
    pad_columns,
    repeat_blocks,
    to_mlx_affine,
    unpack_bits,
)
from mlx_transmuter.ops.functional.indexing import index_array, take, wrap_indices
from mlx_transmuter.ops.functional.kernels import quantized_matmul
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError, op


@op("com.microsoft.MatMulNBits-1")
def mat_mul_n_bits(
    a,
    b,
    scales,
    zero_points=None,
    g_idx: Indices = None,
    bias=None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
):
    """a [..., K] times the transpose of a weight [N, K] in blocks of bits bits; plus bias [N].

    b: uint8 [N, blocks, block_size · bits / 8]; scales: [N, blocks]; zero_points: packed as b's values or floats, one
    per block, 2^(bits - 1) where absent; g_idx: int32 [K], each column's block where they are not in order.
    accuracy_level lets an implementation round a; this one never does. com.microsoft MatMulNBits-1.
    """
    if bits not in (2, 4, 8) or weight_prepacked:
        raise OperatorError(
            f"{bits} bits, weight_prepacked {weight_prepacked}", "2, 4 or 8 bits, as the specification packs them"
        )
    if not b.size:
        product = mx.zeros((*a.shape[:-1], N), dtype=a.dtype)
        return product if bias is None else product + bias
    blocks = -(-K // block_size)
    packed, scales = b.reshape(N, blocks, block_size * bits // 8), scales.reshape(N, blocks)
    affine = None
    column_blocks = Indices.of(np.arange(K) // block_size)
    if g_idx is not None and math.prod(g_idx.shape):
        g_idx = Indices.of(g_idx).reshape(-1)
        column_blocks = Indices(g_idx.array[:K], g_idx.range)
    else:
        affine = to_mlx_affine(packed, scales, zero_points, bits, block_size)
    if affine is not None:
        w, scale, biases, group = affine
        x = pad_columns(a, blocks * block_size - K)
        product = quantized_matmul(x, w, scale, biases, transpose=True, group_size=group, bits=bits).astype(a.dtype)
    else:
        product = a @ dequantize_blocks(packed, scales, zero_points, bits, column_blocks).astype(a.dtype).T
    return product if bias is None else product + bias


# The values of the 16 codes: bitsandbytes' FP4 (a sign, two bits of exponent, one of mantissa) and QLoRA's NF4, the
# quantiles of a normal distribution. Dettmers et al. 2023.
_FP4_VALUES = (0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)
_BNB4_CODE_VALUES = {
    0: (*_FP4_VALUES, *(-value for value in _FP4_VALUES)),
    1: (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
}


@op("com.microsoft.MatMulBnb4-1")
def mat_mul_bnb4(
    a, b, absmax, *, K: int, N: int, block_size: int, quant_type: int, training_mode: int = 0, transB: int = 1
):
    """a [..., K] times the transpose of a weight [N, K] (or a [..., N] times it, without transB) in 4-bit codes.

    b: uint8 [N · K / 2], the first code in the high bits; absmax: [N · K / block_size], the value of a code of 1 in
    each run of block_size weights; quant_type: 0 for FP4, 1 for NF4. com.microsoft MatMulBnb4-1.
    """
    weight = dequantize_bnb4(b, absmax, N, K, block_size, quant_type).astype(a.dtype)
    return a @ (weight.T if transB else weight)


def dequantize_bnb4(
    packed: mx.array, absmax: mx.array, rows: int, columns: int, block_size: int, kind: int
) -> mx.array:
    """Returns the weight [rows, columns] of MatMulBnb4 in float32. Raises OperatorError for an unknown quant_type."""
    if kind not in _BNB4_CODE_VALUES:
        raise OperatorError(f"quant_type {kind}", "0 (FP4) or 1 (NF4)")
    size = rows * columns
    codes = mx.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[:size]
    values = take(mx.array(_BNB4_CODE_VALUES[kind], mx.float32), Indices.between(codes.astype(mx.int32), 0, 15))
    scales = mx.repeat(absmax.reshape(-1).astype(mx.float32), block_size)[:size]
    return (values * scales).reshape(rows, columns)


@op("com.microsoft.GatherBlockQuantized-1")
def gather_block_quantized(
    data,
    indices: Indices,
    scales,
    zero_points=None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
):
    """Gather on gather_axis of data in blocks of block_size along quantize_axis, dequantized: in scales' type.

    data: int4 or uint4 (one value per element here) or packed uint8, the lowest bits first, along the last axis;
    scales: data's shape with one per block on quantize_axis; zero_points: packed as data, 0 for int4 and uint4,
    2^(bits - 1) for uint8 where absent; indices: any shape, negative ones count from the end, those out of range give
    zeros. com.microsoft GatherBlockQuantized-1.
    """
    axis, blocked = gather_axis % data.ndim, quantize_axis % data.ndim
    per_byte = 8 // bits if _shares_bytes(data, scales, blocked, bits, block_size) else 1
    default = float(1 << (bits - 1)) if data.dtype == mx.uint8 and (per_byte > 1 or bits == 8) else 0.0
    size = data.shape[axis]
    row, inside = _rows_inside(Indices.of(indices), size)

    def rows(x: mx.array) -> mx.array:
        return take(x, row, axis=axis)

    values, scale = rows(data), rows(scales)
    zeros = None if zero_points is None else rows(zero_points)
    # The number of quantize_axis once the axes of the indices replace gather_axis.
    place = blocked + row.ndim - 1 if blocked > axis else blocked
    if per_byte > 1:
        values = unpack_bits(values, bits, values.shape[-1] * per_byte)
        zeros = None if zeros is None else unpack_bits(zeros, bits, scale.shape[-1])
    if blocked == axis:  # a row of data has the scale of its block, not of its own index
        block = Indices.between(index_array(row) // block_size, 0, (size - 1) // block_size)
        scale = take(scales, block, axis=axis)
        zeros = None if zero_points is None else take(zero_points, block, axis=axis)
    else:
        scale = repeat_blocks(scale, place, block_size, values.shape[place])
        zeros = None if zeros is None else repeat_blocks(zeros, place, block_size, values.shape[place])
    floats = values.astype(mx.float32) - (default if zeros is None else zeros.astype(mx.float32))
    floats = (floats * scale.astype(mx.float32)).astype(scales.dtype)
    if inside is None:
        return floats
    mask = inside.reshape(*(1,) * axis, *row.shape, *(1,) * (data.ndim - axis - 1))
    return mx.where(mask, floats, mx.zeros((), dtype=scales.dtype))


def _rows_inside(indices: Indices, size: int) -> tuple[Indices, mx.array | None]:
    """Returns the indices into an axis of that size as indices from 0 to size - 1, and which of them are in the axis;
    None where all are known to be.
    """
    if indices.range is not None and indices.range.is_within(-size, size - 1):
        return Indices.between(wrap_indices(indices, size), 0, size - 1), None
    array = index_array(indices)
    row = mx.clip(mx.where(array < 0, array + size, array), 0, size - 1)
    return Indices.between(row, 0, size - 1), (array >= -size) & (array < size)


def _shares_bytes(data: mx.array, scales: mx.array, blocked: int, bits: int, block_size: int) -> bool:
    """Returns whether values share a byte. A uint4 tensor is uint8 here, too, but with fewer blocks for its size."""
    if data.dtype != mx.uint8 or bits == 8:
        return False
    if blocked != data.ndim - 1:
        return False
    return scales.shape[blocked] == -(-data.shape[blocked] * (8 // bits) // block_size)
