"""Weights in blocks of 2, 4 or 8 bits, as com.microsoft packs them: unpacked, dequantized, or as MLX packs them."""

import mlx.core as mx

from mlx_transmuter.ops.functional.indexing import AnyIndices, take
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.registry import OperatorError

# The group sizes of MLX's affine quantization, the fastest first.
AFFINE_GROUP_SIZES = (128, 64, 32)


def unpack_bits(packed: mx.array, bits: int, count: int) -> mx.array:
    """Returns the first `count` values of `bits` bits in each row of packed, uint8, lowest bits first: [..., count]."""
    if bits == 8:
        return packed[..., :count]
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    values = (packed[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint8)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


def pad_columns(x: mx.array, count: int) -> mx.array:
    """Returns x [..., columns] with `count` columns of zeros after its own, so that the last block is full."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x


def repeat_blocks(x: mx.array, axis: int, block_size: int, size: int) -> mx.array:
    """Returns one value per element from one per block: x repeated block_size times along axis, cut to `size`.

    Raises OperatorError where the blocks have fewer than `size` elements.
    """
    if x.shape[axis] * block_size < size:
        raise OperatorError(f"{x.shape[axis]} blocks of {block_size}", f"enough for {size} elements")
    repeated = mx.repeat(x, block_size, axis=axis)
    return mx.split(repeated, [size], axis=axis)[0] if repeated.shape[axis] > size else repeated


def zero_points_as_floats(zero_points: mx.array | None, scales: mx.array, bits: int) -> mx.array:
    """Returns the zero points in the shape of scales [rows, blocks], float32.

    zero_points: packed uint8, floats, or None for 2^(bits - 1).
    """
    if zero_points is None:
        return mx.full(scales.shape, float(1 << (bits - 1)), dtype=mx.float32)
    rows, blocks = scales.shape
    if zero_points.dtype == mx.uint8:
        zero_points = unpack_bits(zero_points.reshape(rows, -1), bits, blocks)
    return zero_points.reshape(rows, blocks).astype(mx.float32)


def to_mlx_affine(
    packed: mx.array, scales: mx.array, zero_points: mx.array | None, bits: int, block_size: int
) -> tuple[mx.array, mx.array, mx.array, int] | None:
    """Returns the weights as MLX's affine quantization: w, scales, biases, group size; None if no group size divides
    the block.

    packed: uint8 [rows, blocks, block_size · bits / 8]; scales: [rows, blocks]; zero_points: see zero_points_as_floats.
    Only zero point times scale is rounded, in float32 unless scales are float16; the default zero point rounds nothing.
    """
    group = next((size for size in AFFINE_GROUP_SIZES if block_size % size == 0), None)
    if group is None:
        return None
    scale = scales if scales.dtype == mx.float16 else scales.astype(mx.float32)
    biases = (-zero_points_as_floats(zero_points, scales, bits) * scale.astype(mx.float32)).astype(scale.dtype)
    if block_size > group:
        scale, biases = mx.repeat(scale, block_size // group, axis=1), mx.repeat(biases, block_size // group, axis=1)
    return packed.reshape(packed.shape[0], -1).view(mx.uint32), scale, biases, group


def dequantize_blocks(
    packed: mx.array, scales: mx.array, zero_points: mx.array | None, bits: int, column_blocks: AnyIndices
) -> mx.array:
    """Returns the weights [rows, columns] in float32; column_blocks, int32 [columns], is the block of each column.

    packed, scales, zero_points: as in to_mlx_affine.
    """
    column_blocks = Indices.of(column_blocks)
    values = unpack_bits(packed.reshape(packed.shape[0], -1), bits, column_blocks.shape[0]).astype(mx.float32)
    zeros = take(zero_points_as_floats(zero_points, scales, bits), column_blocks, axis=1)
    return (values - zeros) * take(scales, column_blocks, axis=1).astype(mx.float32)
