"""Convolutions over [batch, channels, *space] in one to three dimensions, and the sum of patches into images."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import indexed_rows, take
from mlx_transmuter.ops.functional.sliding_windows import place_windows, split_same_padding
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


def _to_channels_last(x: mx.array) -> mx.array:
    """Returns x with the channels moved from axis 1 to the end, where MLX has them."""
    return x.transpose(0, *range(2, x.ndim), 1)


def _to_channels_first(x: mx.array) -> mx.array:
    return x.transpose(0, x.ndim - 1, *range(1, x.ndim - 1))


def convolve(
    x: mx.array,
    w: mx.array,
    *,
    pad_before: list[int],
    pad_after: list[int],
    strides: int | list[int] = 1,
    dilations: int | list[int] = 1,
    upsample: int | list[int] = 1,
    groups: int = 1,
    flip: bool = False,
) -> mx.array:
    """Returns x [batch, in, *space], padded by pad_before and pad_after, convolved with w [out, in / groups, *kernel].

    The result is [batch, out, *space]. upsample: zeros between the elements of x, as its step; flip: w backwards.
    """
    if not w.size:
        raise OperatorError(f"kernels {list(w.shape)}", "sizes of at least 1")
    if x.ndim == 5 and groups > 1:
        # MLX has groups in one and two dimensions; in three each group is a convolution.
        parts = [
            convolve(
                part,
                kernel,
                pad_before=pad_before,
                pad_after=pad_after,
                strides=strides,
                dilations=dilations,
                upsample=upsample,
                flip=flip,
            )
            for part, kernel in zip(mx.split(x, groups, axis=1), mx.split(w, groups, axis=0), strict=True)
        ]
        return mx.concatenate(parts, axis=1)
    y = mx.conv_general(
        _to_channels_last(x),
        _to_channels_last(w),
        stride=strides,
        padding=(list(pad_before), list(pad_after)),
        kernel_dilation=dilations,
        input_dilation=upsample,
        groups=groups,
        flip=flip,
    )
    return _to_channels_first(y)


def _add_channel_bias(y: mx.array, bias: mx.array | None) -> mx.array:
    return y if bias is None else y + bias.reshape(1, -1, *[1] * (y.ndim - 2))


@op("Conv-1")
def conv(x, w, bias=None, *, auto_pad="NOTSET", dilations=None, group=1, kernel_shape=None, pads=None, strides=None):
    """x [batch, in, *space] with the kernels w [out, in / group, *kernel] and bias [out]: [batch, out, *space].

    ONNX Conv-1, 11, 22.
    """
    at = place_windows(x.shape[2:], w.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad)
    y = convolve(
        x,
        w,
        pad_before=at.pad_before,
        pad_after=at.pad_after,
        strides=at.strides,
        dilations=at.dilations,
        groups=group,
    )
    return _add_channel_bias(y, bias)


@op("ConvTranspose-1")
def conv_transpose(
    x,
    w,
    bias=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    """The transpose of Conv: x [batch, in, *space], w [in, out / group, *kernel]. ONNX ConvTranspose-1, 11, 22."""
    space, kernel = x.shape[2:], w.shape[2:]
    rank = len(space)
    strides, dilations = strides or [1] * rank, dilations or [1] * rank
    extra = output_padding or [0] * rank
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    full = [strides[i] * (space[i] - 1) + extra[i] + spans[i] for i in range(rank)]
    pads = list(pads or [0] * (2 * rank))
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        lengths = list(output_shape)[-rank:] if output_shape else [n * s for n, s in zip(space, strides, strict=True)]
        total = [max(f - n, 0) for f, n in zip(full, lengths, strict=True)]
        before, after = split_same_padding(total, auto_pad)
        pads = before + after
        extra = [e + max(n - f, 0) for e, f, n in zip(extra, full, lengths, strict=True)]
    elif auto_pad == "VALID":
        pads = [0] * (2 * rank)
    elif auto_pad != "NOTSET":
        raise OperatorError(f"the padding {auto_pad!r}", "NOTSET, SAME_UPPER, SAME_LOWER or VALID")
    before = [span - 1 - low for span, low in zip(spans, pads[:rank], strict=True)]
    after = [span - 1 - high + e for span, high, e in zip(spans, pads[rank:], extra, strict=True)]
    kernels = w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2)
    kernels = kernels.reshape(-1, w.shape[0] // group, *kernel)
    crop = [slice(max(-low, 0), None if high >= 0 else high) for low, high in zip(before, after, strict=True)]
    before, after = [max(n, 0) for n in before], [max(n, 0) for n in after]
    y = convolve(
        x,
        kernels,
        pad_before=before,
        pad_after=after,
        dilations=dilations,
        upsample=strides,
        groups=group,
        flip=True,
    )
    return _add_channel_bias(y[(slice(None), slice(None), *crop)], bias)


@op("Col2Im-18")
def col2im(x, image_shape: HostArray, block_shape: HostArray, *, dilations=None, pads=None, strides=None):
    """The columns x [batch, channels * block, blocks] summed at their positions: [batch, channels, *image].

    ONNX Col2Im-18.
    """
    image, block = image_shape.tolist(), block_shape.tolist()
    at = place_windows(image, block, strides=strides, dilations=dilations, pads=pads)
    inside, flat = np.ones((), bool), np.zeros((), np.int64)
    for axis, n in enumerate(image):
        places = np.arange(block[axis])[:, None] * at.dilations[axis] + np.arange(at.counts[axis]) * at.strides[axis]
        places = places - at.pad_before[axis]
        within = (places >= 0) & (places < n)
        # Kernel axes before block axes: [k0, k1, ..., b0, b1, ...].
        shape = [1] * (2 * len(image))
        shape[axis], shape[len(image) + axis] = places.shape
        inside = inside & within.reshape(shape)
        flat = flat * n + places.reshape(shape)
    inside, flat = inside.reshape(-1), flat.reshape(-1)
    batch, size = x.shape[0], math.prod(image)
    values = x.reshape(batch, x.shape[1] // math.prod(block), -1)
    planes = take(values.reshape(-1, inside.size).T, np.flatnonzero(inside))
    image_flat = indexed_rows(mx.zeros((size, planes.shape[1]), x.dtype), flat[inside]).add(planes)
    return image_flat.T.reshape(batch, values.shape[1], *image)
