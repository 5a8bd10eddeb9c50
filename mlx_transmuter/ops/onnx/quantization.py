"""ONNX's own quantization: linear quantization, and products and convolutions of quantized arrays."""

from functools import partial

import mlx.core as mx

from mlx_transmuter.ops.functional.integer_quantization import (
    broadcast_channels,
    broadcast_rows,
    broadcast_scale,
    dequantize_affine,
    integer_conv,
    integer_matmul,
    quantize_to,
    quantized_type_name,
    round_and_saturate,
    subtract_zero_point,
)
from mlx_transmuter.ops.onnx.convolution import conv
from mlx_transmuter.ops.registry import op
from mlx_transmuter.ops.types import device_dtype


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
    result = device_dtype(output_dtype) if output_dtype else x_scale.dtype
    return dequantize_affine(x, broadcast_scale(x_scale, x, axis, block_size), zero_point).astype(result)


@op("DynamicQuantizeLinear-11")
def dynamic_quantize_linear(x):
    """float32 x as uint8 over its range with 0, the scale and the zero point. ONNX DynamicQuantizeLinear-11."""
    low, high = mx.minimum(mx.min(x), 0.0), mx.maximum(mx.max(x), 0.0)
    scale = mx.where(low == high, 1.0, (high - low) / 255.0)
    zero_point = round_and_saturate(-low / scale, 0.0, "uint8")
    return quantize_to(x, scale, zero_point, "uint8"), scale, zero_point


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
    """The product of two quantized matrices, quantized by y_scale and y_zero_point; y_zero_point's type.

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
    float_conv = partial(conv, auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    return integer_conv(float_conv, subtract_zero_point(x, x_zero_point), w, group)


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
    """Conv of quantized x and w plus bias, int32 [out] in units of x_scale · w_scale; quantized to y_zero_point's type.

    w_scale, w_zero_point: scalars or [out]; the other scales and zero points: scalars. ONNX QLinearConv-10.
    """
    float_conv = partial(conv, auto_pad=auto_pad, dilations=dilations, pads=pads, strides=strides)
    kernel = subtract_zero_point(w, broadcast_channels(w_zero_point, w.ndim - 1))
    total = integer_conv(float_conv, subtract_zero_point(x, x_zero_point), kernel, group)
    if bias is not None:
        total = total + broadcast_channels(bias, w.ndim - 2)
    scale = broadcast_channels(x_scale * w_scale / y_scale, w.ndim - 2)
    return round_and_saturate(
        total.astype(mx.float32) * scale, y_zero_point.astype(mx.float32), quantized_type_name(y_zero_point)
    )
