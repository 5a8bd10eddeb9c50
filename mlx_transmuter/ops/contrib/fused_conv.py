"""Convolutions of com.microsoft, with sums and activations fused in, and with channels last."""

import mlx.core as mx

from mlx_transmuter.ops.contrib.activation import apply_fused_activation
from mlx_transmuter.ops.onnx.convolution import conv
from mlx_transmuter.ops.registry import op


@op("com.microsoft.FusedConv-1")
def fused_conv(
    x,
    w,
    bias=None,
    z=None,
    *,
    activation: str = "",
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """Conv, plus z of its shape, and an activation. com.microsoft FusedConv-1."""
    y = conv(x, w, bias, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
    return apply_fused_activation(activation, y if z is None else y + z, activation_params or [])


@op("com.microsoft.NhwcFusedConv-1")
def nhwc_fused_conv(
    x,
    w,
    bias=None,
    z=None,
    *,
    activation: str = "",
    activation_params: list[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """FusedConv of x and z [batch, *space, channels], w as in Conv, to that layout. com.microsoft NhwcFusedConv-1."""
    y = fused_conv(
        mx.moveaxis(x, -1, 1),
        w,
        bias,
        None if z is None else mx.moveaxis(z, -1, 1),
        activation=activation,
        activation_params=activation_params,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        pads=pads,
        strides=strides,
    )
    return mx.moveaxis(y, 1, -1)


@op("com.microsoft.NhwcConv-1")
def nhwc_conv(
    x,
    w,
    bias=None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
):
    """Conv of x [batch, *space, channels], w as in Conv, to the same layout. com.microsoft NhwcConv-1."""
    return nhwc_fused_conv(x, w, bias, auto_pad=auto_pad, dilations=dilations, group=group, pads=pads, strides=strides)
