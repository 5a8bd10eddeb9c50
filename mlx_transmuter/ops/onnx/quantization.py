"""ONNX's own quantisation: linear quantisation and the products of integers, exact to the last bit."""

import math
from collections.abc import Callable

import mlx.core as mx

from mlx_transmuter.ops.onnx.convolution import conv
from mlx_transmuter.ops.registry import OperatorError, op
from mlx_transmuter.ops.types import ELEMENT_TYPE_NAMES, device_dtype

# The integer types that tensors are quantised to, and their ranges. MLX holds those below 8 bits in bytes.
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
# float32 holds every integer up to this: sums of products below it are exact, whatever the order.
MAX_EXACT_FLOAT32_INTEGER = 2**24


def broadcast_scale(scale: mx.array, x: mx.array, axis: int, block_size: int) -> mx.array:
    """scale (or a zero point) to broadcast with x: one for all, one a slice of axis, or one a block along axis."""
    if scale.size == 1 and not block_size:
        return scale.reshape(())
    axis %= x.ndim
    if block_size:
        wide = mx.repeat(scale, block_size, axis=axis)
        return mx.split(wide, [x.shape[axis]], axis=axis)[0] if wide.shape[axis] > x.shape[axis] else wide
    if scale.size != x.shape[axis]:
        raise OperatorError(
            f"{scale.size} scales for axis {axis} of size {x.shape[axis]}", "one for each of its slices"
        )
    return scale.reshape([-1 if i == axis else 1 for i in range(x.ndim)])


def round_and_saturate(x: mx.array, zero_point: mx.array | float, type_name: str) -> mx.array:
    """x, in units of the scale, rounded (halves to even), moved by zero_point and saturated to the type kind."""
    low, high = INTEGER_RANGES[type_name]
    # A NaN has no integer; 0 is what onnxruntime's x86 kernels give for it, before the zero point.
    steps = mx.where(mx.isnan(x), 0.0, mx.round(x)) + zero_point
    return mx.clip(steps, low, high).astype(device_dtype(type_name))


def quantized_type_name(zero_point: mx.array | None, output_dtype: int = 0) -> str:
    """The integer type to quantise to: output_dtype (of ONNX), else the zero point's, else uint8."""
    kind = (
        ELEMENT_TYPE_NAMES.get(output_dtype, "")
        if output_dtype
        else str(zero_point.dtype).split(".")[-1]
        if zero_point is not None
        else "uint8"
    )
    if kind not in INTEGER_RANGES:
        raise OperatorError(
            f"a quantisation to {kind or output_dtype}",
            f"one to {', '.join(INTEGER_RANGES)}: MLX has no 8-bit floats here",
        )
    return kind


def quantize_to(x: mx.array, scale: mx.array, zero_point: mx.array | None, kind: str) -> mx.array:
    """x / scale + zero_point as integers of kind: computed in float32, scale and zero_point broadcast."""
    steps = x.astype(mx.float32) / scale.astype(mx.float32)
    return round_and_saturate(steps, 0.0 if zero_point is None else zero_point.astype(mx.float32), kind)


def dequantize_affine(x: mx.array, scale: mx.array, zero_point: mx.array | None) -> mx.array:
    """(x - zero_point) · scale in float32; scale and zero_point broadcast."""
    if zero_point is not None:
        x = x.astype(mx.int32) - zero_point.astype(mx.int32)
    return x.astype(mx.float32) * scale.astype(mx.float32)


@op("QuantizeLinear-10", "QuantizeLinear-13", "QuantizeLinear-19", "QuantizeLinear-21")
@op("QuantizeLinear-23", "QuantizeLinear-24", "QuantizeLinear-25", "com.microsoft.QuantizeLinear-1")
def quantize_linear(
    x,
    y_scale,
    y_zero_point=None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
):
    """x / y_scale, rounded to even, plus y_zero_point, saturated to y_zero_point's type, or output_dtype, or uint8.

    y_scale, y_zero_point: a scalar, [n] for the n slices of axis, or one for each block_size elements along axis. A
    zero point of 4 or 2 bits lies in bytes here: output_dtype must say its type. ONNX QuantizeLinear-10 to -25;
    com.microsoft QuantizeLinear-1.
    """
    scale = broadcast_scale(y_scale, x, axis, block_size)
    zero_point = None if y_zero_point is None else broadcast_scale(y_zero_point, x, axis, block_size)
    return quantize_to(x, scale, zero_point, quantized_type_name(y_zero_point, output_dtype))


@op("DequantizeLinear-10", "DequantizeLinear-13", "DequantizeLinear-19", "DequantizeLinear-21")
@op("DequantizeLinear-23", "DequantizeLinear-24", "DequantizeLinear-25", "com.microsoft.DequantizeLinear-1")
def dequantize_linear(x, x_scale, x_zero_point=None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0):
    """(x - x_zero_point) · x_scale in x_scale's type, or output_dtype's.

    x_scale, x_zero_point: a scalar, [n] for the n slices of axis, or one for each block_size elements along axis.
    ONNX DequantizeLinear-10 to -25; com.microsoft DequantizeLinear-1.
    """
    zero_point = None if x_zero_point is None else broadcast_scale(x_zero_point, x, axis, block_size)
    result = device_dtype(ELEMENT_TYPE_NAMES[output_dtype]) if output_dtype else x_scale.dtype
    return dequantize_affine(x, broadcast_scale(x_scale, x, axis, block_size), zero_point).astype(result)


@op("DynamicQuantizeLinear-11")
def dynamic_quantize_linear(x):
    """float32 x as uint8 over its range with 0, the scale and the zero point. ONNX DynamicQuantizeLinear-11."""
    low, high = mx.minimum(mx.min(x), 0.0), mx.maximum(mx.max(x), 0.0)
    scale = mx.where(low == high, 1.0, (high - low) / 255.0)
    zero_point = round_and_saturate(-low / scale, 0.0, "uint8")
    return quantize_to(x, scale, zero_point, "uint8"), scale, zero_point


def exact_integer_product(
    multiply: Callable[[mx.array, mx.array], mx.array], a: mx.array, b: mx.array, term_count: int
) -> mx.array:
    """product(a, b) of integers within ±255, each element a sum of that many terms, exact: int32.

    MLX multiplies no integer matrices, and float32 sums are exact up to 2²⁴. Where terms could pass it, a is 16 · high
    + low, and each half's product is exact by itself up to 4,112 terms.
    """
    b = b.astype(mx.float32)
    if term_count * 255 * 255 <= MAX_EXACT_FLOAT32_INTEGER:
        return multiply(a.astype(mx.float32), b).astype(mx.int32)
    if term_count * 16 * 255 > MAX_EXACT_FLOAT32_INTEGER:
        raise OperatorError(
            f"a sum of {term_count} products of integers",
            f"at most {MAX_EXACT_FLOAT32_INTEGER // (16 * 255)} terms at once",
        )
    high = a.astype(mx.int32) >> 4
    low = a.astype(mx.int32) - (high << 4)
    upper, lower = (multiply(half.astype(mx.float32), b).astype(mx.int32) for half in (high, low))
    return (upper << 4) + lower


def integer_matmul(a: mx.array, b: mx.array) -> mx.array:
    """a [..., m, k] · b [..., k, n] of integers within ±255: int32, exact for every k."""
    most = MAX_EXACT_FLOAT32_INTEGER // (16 * 255)
    parts = [
        exact_integer_product(
            mx.matmul,
            a[..., i : i + most],
            b[..., i : i + most, :] if b.ndim > 1 else b[i : i + most],
            min(most, a.shape[-1] - i),
        )
        for i in range(0, max(a.shape[-1], 1), most)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def subtract_zero_point(x: mx.array, zero_point: mx.array | None) -> mx.array:
    """x - zero_point, which broadcasts, as int32."""
    x = x.astype(mx.int32)
    return x if zero_point is None else x - zero_point.astype(mx.int32)


def broadcast_rows(scale: mx.array) -> mx.array:
    """A scale or zero point of the left operand, a scalar or [rows], to broadcast with [..., rows, columns]."""
    return scale[:, None] if scale.ndim == 1 and scale.size > 1 else scale


@op("MatMulInteger-10")
def mat_mul_integer(a, b, a_zero_point=None, b_zero_point=None):
    """(a - a_zero_point) · (b - b_zero_point) of 8-bit integers, as numpy.matmul: int32, exact.

    a_zero_point: a scalar, [m] or [..., m, 1]; b_zero_point: a scalar, [n] or [..., 1, n]. ONNX MatMulInteger-10.
    """
    return integer_matmul(
        subtract_zero_point(a, None if a_zero_point is None else broadcast_rows(a_zero_point)),
        subtract_zero_point(b, b_zero_point),
    )


@op("QLinearMatMul-10", "QLinearMatMul-21")
def q_linear_mat_mul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    """The product of two quantised matrices, quantised by y_scale and y_zero_point; y_zero_point's type.

    Scales and zero points as in MatMulInteger. ONNX QLinearMatMul-10, 21.
    """
    product = integer_matmul(
        subtract_zero_point(a, broadcast_rows(a_zero_point)), subtract_zero_point(b, b_zero_point)
    ).astype(mx.float32)
    scale = (
        broadcast_rows(a_scale.astype(mx.float32))
        * b_scale.astype(mx.float32)
        / broadcast_rows(y_scale.astype(mx.float32))
    )
    return round_and_saturate(
        product * scale, broadcast_rows(y_zero_point).astype(mx.float32), quantized_type_name(y_zero_point)
    )


def integer_conv(x: mx.array, w: mx.array, group: int, **attrs) -> mx.array:
    """Conv of integers within ±255, padded with zeros: int32, exact. attrs are those of conv."""
    terms = math.prod(w.shape[1:])
    most = MAX_EXACT_FLOAT32_INTEGER // (16 * 255)
    if terms <= most or group > 1:
        return exact_integer_product(lambda a, b: conv(a, b, group=group, **attrs), x, w, terms)
    channels = max(most // math.prod(w.shape[2:]), 1)
    parts = [
        integer_conv(x[:, i : i + channels], w[:, i : i + channels], group, **attrs)
        for i in range(0, w.shape[1], channels)
    ]
    return sum(parts[1:], parts[0])


def broadcast_channels(scale: mx.array, rank: int) -> mx.array:
    """A scalar as one, or one number a channel with rank axes of 1 behind it."""
    return scale.reshape(-1, *(1,) * rank) if scale.size > 1 else scale.reshape(())


@op("ConvInteger-10")
def conv_integer(
    x,
    w,
    x_zero_point=None,
    w_zero_point=None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """Conv of x - x_zero_point [batch, in, *space] with w - w_zero_point [out, in / group, *kernel]: int32, exact.

    x_zero_point: a scalar; w_zero_point: a scalar or [out]. ONNX ConvInteger-10.
    """
    w = subtract_zero_point(w, None if w_zero_point is None else broadcast_channels(w_zero_point, w.ndim - 1))
    attrs = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    return integer_conv(subtract_zero_point(x, x_zero_point), w, group, **attrs)


@op("QLinearConv-10")
def q_linear_conv(
    x,
    x_scale,
    x_zero_point,
    w,
    w_scale,
    w_zero_point,
    y_scale,
    y_zero_point,
    bias=None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """Conv of quantised x and w plus bias, int32 [out] in units of x_scale · w_scale; quantised to y_zero_point's type.

    w_scale, w_zero_point: scalars or [out]; the other scales and zero points: scalars. ONNX QLinearConv-10.
    """
    attrs = {"auto_pad": auto_pad, "dilations": dilations, "pads": pads, "strides": strides}
    kernel = subtract_zero_point(w, broadcast_channels(w_zero_point, w.ndim - 1))
    total = integer_conv(subtract_zero_point(x, x_zero_point), kernel, group, **attrs)
    if bias is not None:
        total = total + broadcast_channels(bias, w.ndim - 2)
    scale = broadcast_channels(x_scale * w_scale / y_scale, w.ndim - 2)
    return round_and_saturate(
        total.astype(mx.float32) * scale, y_zero_point.astype(mx.float32), quantized_type_name(y_zero_point)
    )
