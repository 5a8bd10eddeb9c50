"""Weights in 2, 4 or 8 bits of com.microsoft: MatMulNBits and GatherBlockQuantized."""

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError, op


def unpack(packed: mx.array, bits: int, count: int) -> mx.array:
    """The first count values of bits bits in each last-axis row of packed uint8, the lowest bits first: uint8 [..., count]."""
    if bits == 8:
        return packed[..., :count]
    shifts = mx.arange(0, 8, bits, dtype=mx.uint8)
    values = (packed[..., None] >> shifts) & mx.array((1 << bits) - 1, mx.uint8)
    return values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


def zero_points_of(zero_points: mx.array | None, scales: mx.array, bits: int) -> mx.array:
    """The zero points, one a block, in float32 and scales' shape [rows, blocks]: packed, float, or 2^(bits - 1) where None."""
    if zero_points is None:
        return mx.full(scales.shape, float(1 << (bits - 1)), dtype=mx.float32)
    rows, blocks = scales.shape
    if zero_points.dtype == mx.uint8:
        zero_points = unpack(zero_points.reshape(rows, -1), bits, blocks)
    return zero_points.reshape(rows, blocks).astype(mx.float32)


def affine(
    packed: mx.array, scales: mx.array, zero_points: mx.array | None, bits: int, block_size: int
) -> tuple[mx.array, mx.array, mx.array, int] | None:
    """MatMulNBits weights as MLX's affine quantisation: w, scales, biases, group size; None for blocks MLX has no form of.

    packed: uint8 [rows, blocks, block_size · bits / 8]; scales: [rows, blocks]. Nothing is rounded, but the product of zero
    point and scale: it is float32 unless scales are float16, and then exact for a power of two, as the default is.
    """
    group = min(block_size, 128)
    if group not in (32, 64, 128) or block_size % group:
        return None
    scale = scales if scales.dtype == mx.float16 else scales.astype(mx.float32)
    biases = (-zero_points_of(zero_points, scales, bits) * scale.astype(mx.float32)).astype(scale.dtype)
    if block_size > group:
        scale, biases = mx.repeat(scale, block_size // group, axis=1), mx.repeat(biases, block_size // group, axis=1)
    return packed.reshape(packed.shape[0], -1).view(mx.uint32), scale, biases, group


@op("com.microsoft.MatMulNBits-1")
def mat_mul_n_bits(
    a,
    b,
    scales,
    zero_points=None,
    g_idx=None,
    bias=None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
):
    """a [..., K] times the transpose of a weight [N, K] held in blocks of bits bits; plus bias [N].

    b: uint8 [N, blocks, block_size · bits / 8]; scales: [N, blocks]; zero_points: packed as b's values or floats, one a block,
    2^(bits - 1) where absent; g_idx: int32 [K], each column's block where they are not in order. accuracy_level lets an
    implementation round a; this one never does. com.microsoft MatMulNBits-1.
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
    held = affine(packed, scales, zero_points, bits, block_size) if g_idx is None or not g_idx.size else None
    if held is not None:
        w, scale, biases, group = held
        x = mx.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, blocks * block_size - K)]) if K % block_size else a
        product = mx.quantized_matmul(x, w, scale, biases, transpose=True, group_size=group, bits=bits).astype(a.dtype)
    else:
        values = unpack(packed.reshape(N, -1), bits, K).astype(mx.float32)
        zeros = zero_points_of(zero_points, scales, bits)
        column = (
            mx.arange(K, dtype=mx.int32) // block_size if g_idx is None or not g_idx.size else g_idx.reshape(-1)[:K]
        )
        weight = (values - zeros[:, column]) * scales[:, column].astype(mx.float32)
        product = a @ weight.astype(a.dtype).T
    return product if bias is None else product + bias


@op("com.microsoft.GatherBlockQuantized-1")
def gather_block_quantized(
    data,
    indices,
    scales,
    zero_points=None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
):
    """Gather on gather_axis of data that is held in blocks of block_size along quantize_axis, dequantised: scales' type.

    data: int4 or uint4 (one value an element here) or packed uint8, the lowest bits first, along the last axis; scales: data's
    shape with one a block on quantize_axis; zero_points: packed as data, 0 for int4 and uint4, 2^(bits - 1) for uint8 where
    absent; indices: any shape, negative ones from the end, those out of range give zeros. com.microsoft GatherBlockQuantized-1.
    """
    axis, blocked = gather_axis % data.ndim, quantize_axis % data.ndim
    per_byte = 8 // bits if _is_packed(data, scales, blocked, bits, block_size) else 1
    default = float(1 << (bits - 1)) if data.dtype == mx.uint8 and (per_byte > 1 or bits == 8) else 0.0
    size = data.shape[axis]
    row = mx.where(indices < 0, indices + size, indices)
    inside = (row >= 0) & (row < size)
    row = mx.clip(row, 0, size - 1)

    def rows(x: mx.array) -> mx.array:
        return mx.take(x, row, axis=axis)

    values, scale = rows(data), rows(scales)
    zeros = None if zero_points is None else rows(zero_points)
    place = (
        blocked + row.ndim - 1 if blocked > axis else blocked
    )  # where quantize_axis stands once the indices' axes are in
    if per_byte > 1:
        values = unpack(values, bits, values.shape[-1] * per_byte)
        zeros = None if zeros is None else unpack(zeros, bits, scale.shape[-1])
    if blocked == axis:  # a row of data has the scale of its block, not of its own index
        block = row // block_size
        scale = mx.take(scales, block, axis=axis)
        zeros = None if zero_points is None else mx.take(zero_points, block, axis=axis)
    else:
        scale = _spread(scale, place, block_size, values.shape[place])
        zeros = None if zeros is None else _spread(zeros, place, block_size, values.shape[place])
    floats = values.astype(mx.float32) - (default if zeros is None else zeros.astype(mx.float32))
    floats = (floats * scale.astype(mx.float32)).astype(scales.dtype)
    mask = inside.reshape(*(1,) * axis, *row.shape, *(1,) * (data.ndim - axis - 1))
    return mx.where(mask, floats, mx.zeros((), dtype=scales.dtype))


def _is_packed(data: mx.array, scales: mx.array, blocked: int, bits: int, block_size: int) -> bool:
    """Whether several values share a byte. A uint4 tensor is uint8 here too, one value an element: the scales tell them apart."""
    if data.dtype != mx.uint8 or bits == 8:
        return False
    if blocked != data.ndim - 1:
        return False
    return scales.shape[blocked] == -(-data.shape[blocked] * (8 // bits) // block_size)


def _spread(x: mx.array, axis: int, block_size: int, size: int) -> mx.array:
    """One value a block to one an element: x repeated block_size times along axis, cut to size."""
    if x.shape[axis] * block_size < size:
        raise OperatorError(f"{x.shape[axis]} blocks of {block_size}", f"enough for {size} elements")
    wide = mx.repeat(x, block_size, axis=axis)
    return mx.split(wide, [size], axis=axis)[0] if wide.shape[axis] > size else wide
