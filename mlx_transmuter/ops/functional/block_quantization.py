"""Weights in blocks of 2, 4 or 8 bits, as com.microsoft packs them: unpacked, dequantised, or in MLX's own form."""

import mlx.core as mx

# MLX's affine quantisation has a scale and a bias for so many weights; the largest costs the least.
AFFINE_GROUP_SIZES = (128, 64, 32)


def unpack_bits(packed: mx.array, bits: int, count: int) -> mx.array:
    """The first count values of bits bits in the rows of packed, uint8, the lowest bits first: uint8 [..., count]."""
    if bits == 8:
        return packed[..., :count]
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    values = (packed[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint8)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


def zero_points_as_floats(zero_points: mx.array | None, scales: mx.array, bits: int) -> mx.array:
    """The zero points in scales' shape [rows, blocks], float32: packed, in floats, or 2^(bits - 1) where None."""
    if zero_points is None:
        return mx.full(scales.shape, float(1 << (bits - 1)), dtype=mx.float32)
    rows, blocks = scales.shape
    if zero_points.dtype == mx.uint8:
        zero_points = unpack_bits(zero_points.reshape(rows, -1), bits, blocks)
    return zero_points.reshape(rows, blocks).astype(mx.float32)


def to_mlx_affine(
    packed: mx.array, scales: mx.array, zero_points: mx.array | None, bits: int, block_size: int
) -> tuple[mx.array, mx.array, mx.array, int] | None:
    """The weights as MLX's affine quantisation: w, scales, biases, group size; None for blocks that it has no form of.

    packed: uint8 [rows, blocks, block_size · bits / 8]; scales: [rows, blocks]; zero_points: see zero_points_of. The
    one thing rounded is zero point times scale, in float32 unless scales are float16; the default zero point rounds
    nothing.
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
    packed: mx.array, scales: mx.array, zero_points: mx.array | None, bits: int, column_blocks: mx.array
) -> mx.array:
    """The weights [rows, columns] in float32, block_of, int32 [columns], being the block of each column. As affine."""
    values = unpack_bits(packed.reshape(packed.shape[0], -1), bits, column_blocks.size).astype(mx.float32)
    zeros = zero_points_as_floats(zero_points, scales, bits)
    return (values - zeros[:, column_blocks]) * scales[:, column_blocks].astype(mx.float32)
