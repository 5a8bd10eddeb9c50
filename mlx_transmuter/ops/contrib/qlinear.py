"""Operators of com.microsoft on quantized tensors: dequantized, computed in floats, and quantized again."""

import mlx.core as mx

from mlx_transmuter.ops.functional.integer_quantization import dequantize_affine, quantize_to, quantized_type_name
from mlx_transmuter.ops.onnx.pooling import average_pool
from mlx_transmuter.ops.onnx.quantization import q_linear_conv
from mlx_transmuter.ops.registry import op


def _requantize(x: mx.array, scale: mx.array, zero_point: mx.array | None, like: mx.array) -> mx.array:
    """Returns float x quantized to the type of zero_point, or of `like` where it is absent."""
    return quantize_to(x, scale, zero_point, quantized_type_name(like if zero_point is None else zero_point))


@op("com.microsoft.QLinearAdd-1")
def q_linear_add(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    """a + b, broadcast. com.microsoft QLinearAdd-1."""
    total = dequantize_affine(a, a_scale, a_zero_point) + dequantize_affine(b, b_scale, b_zero_point)
    return _requantize(total, c_scale, c_zero_point, a)


@op("com.microsoft.QLinearMul-1")
def q_linear_mul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, c_scale, c_zero_point=None):
    """a · b, broadcast. com.microsoft QLinearMul-1."""
    product = dequantize_affine(a, a_scale, a_zero_point) * dequantize_affine(b, b_scale, b_zero_point)
    return _requantize(product, c_scale, c_zero_point, a)


@op("com.microsoft.QLinearSigmoid-1")
def q_linear_sigmoid(x, x_scale, x_zero_point, y_scale, y_zero_point=None):
    """The logistic function of x. com.microsoft QLinearSigmoid-1."""
    return _requantize(mx.sigmoid(dequantize_affine(x, x_scale, x_zero_point)), y_scale, y_zero_point, x)


@op("com.microsoft.QLinearLeakyRelu-1")
def q_linear_leaky_relu(x, x_scale, x_zero_point, y_scale, y_zero_point=None, *, alpha: float = 0.01):
    """x where positive, else alpha · x. com.microsoft QLinearLeakyRelu-1."""
    values = dequantize_affine(x, x_scale, x_zero_point)
    return _requantize(mx.where(values >= 0, values, alpha * values), y_scale, y_zero_point, x)


@op("com.microsoft.QLinearSoftmax-1")
def q_linear_softmax(x, x_scale, x_zero_point, y_scale, y_zero_point, *, axis: int = -1, opset: int):
    """The softmax of x over axis, or before opset 13 over the axes from axis on. com.microsoft QLinearSoftmax-1."""
    values = dequantize_affine(x, x_scale, x_zero_point)
    axes = axis if opset >= 13 else list(range(axis % x.ndim, x.ndim))
    return _requantize(mx.softmax(values, axis=axes), y_scale, y_zero_point, x)


@op("com.microsoft.QLinearConcat-1")
def q_linear_concat(y_scale, y_zero_point, *parts, axis: int):
    """The parts, each a tensor, its scale and its zero point, joined on axis. com.microsoft QLinearConcat-1."""
    floats = [dequantize_affine(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return _requantize(mx.concatenate(floats, axis=axis), y_scale, y_zero_point, y_zero_point)


@op("com.microsoft.QLinearWhere-1")
def q_linear_where(condition, x, x_scale, x_zero_point, y, y_scale, y_zero_point, z_scale, z_zero_point):
    """x where condition, else y, broadcast. com.microsoft QLinearWhere-1."""
    chosen = mx.where(
        condition, dequantize_affine(x, x_scale, x_zero_point), dequantize_affine(y, y_scale, y_zero_point)
    )
    return _requantize(chosen, z_scale, z_zero_point, x)


@op("com.microsoft.QLinearReduceMean-1")
def q_linear_reduce_mean(x, x_scale, x_zero_point, y_scale, y_zero_point=None, *, axes: list[int], keepdims: int):
    """The mean of x over axes. com.microsoft QLinearReduceMean-1."""
    mean = mx.mean(dequantize_affine(x, x_scale, x_zero_point), axis=axes, keepdims=bool(keepdims))
    return _requantize(mean, y_scale, y_zero_point, x)


@op("com.microsoft.QLinearGlobalAveragePool-1")
def q_linear_global_average_pool(x, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last: int = 0):
    """The mean of each channel of x [batch, channels, *space], or channels last. QLinearGlobalAveragePool-1."""
    axes = list(range(1, x.ndim - 1)) if channels_last else list(range(2, x.ndim))
    mean = mx.mean(dequantize_affine(x, x_scale, x_zero_point), axis=axes, keepdims=True)
    return _requantize(mean, y_scale, y_zero_point, x)


@op("com.microsoft.QLinearAveragePool-1")
def q_linear_average_pool(
    x,
    x_scale,
    x_zero_point,
    y_scale,
    y_zero_point=None,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """AveragePool of x [batch, channels, *space], or [batch, *space, channels]. com.microsoft QLinearAveragePool-1."""
    values = dequantize_affine(x, x_scale, x_zero_point)
    values = mx.moveaxis(values, -1, 1) if channels_last else values
    mean = average_pool(
        values,
        kernel_shape=kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        pads=pads,
        strides=strides,
    )
    return _requantize(mx.moveaxis(mean, 1, -1) if channels_last else mean, y_scale, y_zero_point, x)


@op("com.microsoft.QLinearConv-1")
def contrib_q_linear_conv(
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
    channels_last: int = 0,
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """ONNX's QLinearConv, of x [batch, *space, channels] where channels_last. com.microsoft QLinearConv-1."""
    y = q_linear_conv(
        mx.moveaxis(x, -1, 1) if channels_last else x,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    return mx.moveaxis(y, 1, -1) if channels_last else y
