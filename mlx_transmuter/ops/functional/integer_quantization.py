"""Linear quantization to integers, and products of integers that are exact to the last bit."""

import math
from collections.abc import Callable

import mlx.core as mx

from mlx_transmuter.ops.functional.block_quantization import repeat_blocks
from mlx_transmuter.ops.functional.indexing import axis_shape
from mlx_transmuter.ops.registry import OperatorError
from mlx_transmuter.ops.types import ELEMENT_TYPE_NAMES, device_dtype

# The integer types to which tensors are quantized, and their ranges. MLX has those below 8 bits in bytes.
INTEGER_RANGES = {
    "int8": (-128, 127),
    "uint8": (0, 255),
    "int16": (-32768, 32767),
    "uint16": (0, 65535),
    "int4": (-8, 7),
    "uint4": (0, 15),
    "int2": (-2, 1),
    "uint2": (0, 3),
}
# float32 represents every integer up to this, so sums of products up to it are exact, in any order.
MAX_EXACT_FLOAT32_INTEGER = 2**24
# The most terms of one exact sum, the left operand being split into 16 · high + low.
MAX_EXACT_TERMS = MAX_EXACT_FLOAT32_INTEGER // (16 * 255)


def broadcast_scale(scale: mx.array, x: mx.array, axis: int, block_size: int) -> mx.array:
    """Returns a scale or zero point in a shape that broadcasts with x.

    scale: one for all of x; one per slice of axis; or, with a block_size, one per block along axis. Raises
    OperatorError for another number of them.
    """
    if scale.size == 1 and not block_size:
        return scale.reshape(())
    axis %= x.ndim
    if block_size:
        return repeat_blocks(scale, axis, block_size, x.shape[axis])
    if scale.size != x.shape[axis]:
        raise OperatorError(
            f"{scale.size} scales for axis {axis} of size {x.shape[axis]}", "one for each of its slices"
        )
    return scale.reshape(axis_shape(axis, x.ndim))


def round_and_saturate(x: mx.array, zero_point: mx.array | float, type_name: str) -> mx.array:
    """Returns x, in units of the scale, rounded (halves to even), plus zero_point, saturated to an integer type."""
    low, high = INTEGER_RANGES[type_name]
    # A NaN has no integer; 0 is what onnxruntime's x86 kernels give for it, before the zero point.
    steps = mx.where(mx.isnan(x), 0.0, mx.round(x)) + zero_point
    return mx.clip(steps, low, high).astype(device_dtype(type_name))


def quantized_type_name(zero_point: mx.array | None, output_dtype: int = 0) -> str:
    """Returns the integer type to quantize to: that of the ONNX code output_dtype, else the zero point's, else uint8.

    Raises OperatorError for a type that is no integer of 2 to 16 bits.
    """
    type_name = "uint8" if zero_point is None else str(zero_point.dtype).split(".")[-1]
    if output_dtype:
        type_name = ELEMENT_TYPE_NAMES.get(output_dtype, "")
    if type_name not in INTEGER_RANGES:
        raise OperatorError(
            f"a quantization to {type_name or output_dtype}",
            f"one to {', '.join(INTEGER_RANGES)}: MLX has no 8-bit floats here",
        )
    return type_name


def quantize_to(x: mx.array, scale: mx.array, zero_point: mx.array | None, type_name: str) -> mx.array:
    """Returns x / scale + zero_point as integers of a type, computed in float32; scale and zero_point broadcast."""
    steps = x.astype(mx.float32) / scale.astype(mx.float32)
    return round_and_saturate(steps, 0.0 if zero_point is None else zero_point.astype(mx.float32), type_name)


def dequantize_affine(x: mx.array, scale: mx.array, zero_point: mx.array | None) -> mx.array:
    """Returns (x - zero_point) · scale in float32; scale and zero_point broadcast."""
    if zero_point is not None:
        x = x.astype(mx.int32) - zero_point.astype(mx.int32)
    return x.astype(mx.float32) * scale.astype(mx.float32)


def exact_integer_product(
    multiply: Callable[[mx.array, mx.array], mx.array], a: mx.array, b: mx.array, term_count: int
) -> mx.array:
    """Returns multiply(a, b) of integers within ±255, each element a sum of term_count terms: int32, exact.

    MLX multiplies no integer matrices, and float32 sums are exact up to 2²⁴. Where the terms could exceed that, a is
    split into 16 · high + low, and the product of each half is exact up to 4,112 terms. Raises OperatorError for more.
    """
    b = b.astype(mx.float32)
    if term_count * 255 * 255 <= MAX_EXACT_FLOAT32_INTEGER:
        return multiply(a.astype(mx.float32), b).astype(mx.int32)
    if term_count * 16 * 255 > MAX_EXACT_FLOAT32_INTEGER:
        raise OperatorError(
            f"a sum of {term_count} products of integers",
            f"at most {MAX_EXACT_TERMS} terms at once",
        )
    high = a.astype(mx.int32) >> 4
    low = a.astype(mx.int32) - (high << 4)
    upper, lower = (multiply(half.astype(mx.float32), b).astype(mx.int32) for half in (high, low))
    return (upper << 4) + lower


def integer_matmul(a: mx.array, b: mx.array) -> mx.array:
    """Returns a [..., m, k] · b [..., k, n] of integers within ±255: int32, exact for every k."""
    parts = [
        exact_integer_product(
            mx.matmul,
            a[..., i : i + MAX_EXACT_TERMS],
            b[..., i : i + MAX_EXACT_TERMS, :] if b.ndim > 1 else b[i : i + MAX_EXACT_TERMS],
            min(MAX_EXACT_TERMS, a.shape[-1] - i),
        )
        for i in range(0, max(a.shape[-1], 1), MAX_EXACT_TERMS)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def subtract_zero_point(x: mx.array, zero_point: mx.array | None) -> mx.array:
    """Returns x - zero_point, which broadcasts, as int32."""
    x = x.astype(mx.int32)
    return x if zero_point is None else x - zero_point.astype(mx.int32)


def broadcast_rows(scale: mx.array) -> mx.array:
    """Returns a scale or zero point of the left operand, a scalar or [rows], to broadcast with [..., rows, columns]."""
    return scale[:, None] if scale.ndim == 1 and scale.size > 1 else scale


def integer_conv(conv: Callable[..., mx.array], x: mx.array, w: mx.array, group: int) -> mx.array:
    """Returns the convolution of integers within ±255, padded with zeros: int32, exact.

    conv(x, w, group=) is the convolution of floats.
    """
    terms = math.prod(w.shape[1:])
    if terms <= MAX_EXACT_TERMS or group > 1:
        return exact_integer_product(lambda a, b: conv(a, b, group=group), x, w, terms)
    channels = max(MAX_EXACT_TERMS // math.prod(w.shape[2:]), 1)
    parts = [
        integer_conv(conv, x[:, i : i + channels], w[:, i : i + channels], group)
        for i in range(0, w.shape[1], channels)
    ]
    return sum(parts[1:], parts[0])


def broadcast_channels(scale: mx.array, rank: int) -> mx.array:
    """Returns a scalar as it is, or one value per channel with `rank` axes of size 1 after it."""
    return scale.reshape(-1, *(1,) * rank) if scale.size > 1 else scale.reshape(())
