"""Windows that slide over the spatial axes of [batch, channels, *space]: their positions, padding and views."""

import math
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.ops.registry import OperatorError


class SlidingWindows(NamedTuple):
    """The windows along each spatial axis: their size, stride, dilation, the padding, and their number."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pad_before: list[int]
    pad_after: list[int]
    counts: list[int]

    @property
    def spans(self) -> list[int]:
        """The number of elements from the first to the last of a window, per axis."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]


def place_windows(
    space, kernel, *, strides=None, dilations=None, pads=None, auto_pad="NOTSET", ceil_mode=0
) -> SlidingWindows:
    """Returns the windows over the sizes `space`, by the attributes of ONNX's Conv and pooling operators.

    Raises OperatorError for an unknown auto_pad.
    """
    rank = len(space)
    kernel, strides, dilations = list(kernel), list(strides or [1] * rank), list(dilations or [1] * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = list(pads or [0] * (2 * rank))
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        count = [-(-n // s) for n, s in zip(space, strides, strict=True)]
        total = [max((c - 1) * s + span - n, 0) for c, s, span, n in zip(count, strides, spans, space, strict=True)]
        before, after = split_same_padding(total, auto_pad)
        return SlidingWindows(kernel, strides, dilations, before, after, count)
    if auto_pad not in ("NOTSET", "VALID", ""):
        raise OperatorError(f"the padding {auto_pad!r}", "NOTSET, SAME_UPPER, SAME_LOWER or VALID")
    if auto_pad == "VALID":
        pads = [0] * (2 * rank)
    before, after, count = pads[:rank], pads[rank:], []
    for i, (n, s, span) in enumerate(zip(space, strides, spans, strict=True)):
        room = n + before[i] + after[i] - span
        steps = -(-room // s) if ceil_mode else room // s
        # The last window starts inside the array or the padding before it, not in the padding after it.
        if ceil_mode and steps * s >= n + before[i]:
            steps -= 1
        count.append(max(steps + 1, 0))
    return SlidingWindows(kernel, strides, dilations, before, after, count)


def split_same_padding(total: list[int], auto_pad: str) -> tuple[list[int], list[int]]:
    """Returns the padding before and after each axis; an odd element goes to the end for SAME_UPPER, else before."""
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (small, large) if auto_pad == "SAME_UPPER" else (large, small)


def pad_for_windows(x: mx.array, w: SlidingWindows, filler: float) -> mx.array:
    """Returns x [batch, channels, *space] with as much of `filler` around it as the windows reach."""
    widths = [(0, 0), (0, 0)]
    for n, low, count, stride, span in zip(x.shape[2:], w.pad_before, w.counts, w.strides, w.spans, strict=True):
        widths.append((low, max((count - 1) * stride + span - n - low, 0)))
    if not any(low or high for low, high in widths):
        return x
    return mx.pad(x, widths, constant_values=mx.array(filler, x.dtype))


def window_view(x: mx.array, w: SlidingWindows) -> mx.array:
    """Returns a view of the windows over an array padded for them: [batch, channels, *count, *kernel].

    Raises OperatorError for windows that leave the array, with steps below 1 or padding below 0.
    """
    ends = [(count - 1) * stride + span for count, stride, span in zip(w.counts, w.strides, w.spans, strict=True)]
    is_inside = all(end <= n for end, n in zip(ends, x.shape[2:], strict=True)) or 0 in w.counts
    if not is_inside or min((*w.kernel, *w.strides, *w.dilations)) < 1:
        raise OperatorError(f"windows {w} over {list(x.shape)}", "windows inside it, with steps of at least 1")
    x = mx.contiguous(x)
    steps = [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    strides = [step * s for step, s in zip(steps[2:], w.strides, strict=True)]
    spacing = [step * d for step, d in zip(steps[2:], w.dilations, strict=True)]
    return mx.as_strided(x, [*x.shape[:2], *w.counts, *w.kernel], [*steps[:2], *strides, *spacing])
