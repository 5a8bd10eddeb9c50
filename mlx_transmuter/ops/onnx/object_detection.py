"""Regions of images: pooling over boxes, and the choice among overlapping ones. Boxes are known on the host."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import element, take
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("RoiAlign-10")
def roi_align_10(
    x,
    rois: HostArray,
    batch_indices: HostArray,
    *,
    mode="avg",
    output_height=1,
    output_width=1,
    sampling_ratio=0,
    spatial_scale=1.0,
):
    """RoiAlign-16 whose boxes are not moved by half an element and are at least one wide. ONNX RoiAlign-10."""
    return roi_align(
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@op("RoiAlign-16")
def roi_align(
    x,
    rois: HostArray,
    batch_indices: HostArray,
    *,
    coordinate_transformation_mode="half_pixel",
    mode="avg",
    output_height=1,
    output_width=1,
    sampling_ratio=0,
    spatial_scale=1.0,
):
    """The mean, or the largest, of samples in each cell of each box: [boxes, channels, height, width].

    x [batch, channels, h, w]; rois [boxes, 4] as x1, y1, x2, y2; batch_indices [boxes]. He et al. 2017, Mask R-CNN.
    ONNX RoiAlign-16, 22.
    """
    if mode not in ("avg", "max"):
        raise OperatorError(f"the mode {mode!r}", "avg or max")
    half = coordinate_transformation_mode == "half_pixel"
    results = []
    for box, image in zip(rois.astype(np.float64), batch_indices.tolist(), strict=True):
        x1, y1, x2, y2 = box * spatial_scale - (0.5 if half else 0.0)
        width, height = (x2 - x1, y2 - y1) if half else (max(x2 - x1, 1.0), max(y2 - y1, 1.0))
        rows = _sampling_points(y1, height, output_height, sampling_ratio, x.shape[2])
        columns = _sampling_points(x1, width, output_width, sampling_ratio, x.shape[3])
        results.append(
            _pool_samples(element(x, image).astype(mx.float32), rows, columns, output_height, output_width, mode)
        )
    if not results:
        return mx.zeros((0, x.shape[1], output_height, output_width), x.dtype)
    return mx.stack(results).astype(x.dtype)


def _sampling_points(start: float, length: float, cells: int, ratio: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns, along one axis, the two elements beside each sample and their weights, [2, cells * samples] each."""
    count = ratio if ratio > 0 else math.ceil(length / cells)
    at = start + (np.arange(cells * count) + 0.5) * length / cells / max(count, 1)
    outside = (at < -1) | (at > size)
    at = np.maximum(at, 0)
    low = np.minimum(at.astype(np.int64), size - 1)
    t = np.where(at.astype(np.int64) >= size - 1, 0.0, at - low)
    weights = np.where(outside, 0.0, np.stack([1 - t, t]))
    return np.stack([low, np.minimum(low + 1, size - 1)]).astype(np.int32), weights.astype(np.float32)


def _pool_samples(image: mx.array, rows, columns, height: int, width: int, mode: str) -> mx.array:
    """Returns image [channels, h, w] sampled and reduced over the samples of each cell: [channels, height, width]."""
    (at_r, w_r), (at_c, w_c) = rows, columns
    if not at_r.shape[1] or not at_c.shape[1]:
        return mx.zeros((image.shape[0], height, width))
    corners = []
    for i in range(2):
        for j in range(2):
            part = take(take(image, at_r[i], axis=1), at_c[j], axis=2)
            corners.append(part * mx.array(w_r[i][:, None] * w_c[j]))
    # The largest is taken of the weighted corners one by one, the mean of their sum, as ONNX defines them.
    samples = mx.max(mx.stack(corners), axis=0) if mode == "max" else sum(corners[1:], corners[0])
    cells = samples.reshape(image.shape[0], height, at_r.shape[1] // height, width, at_c.shape[1] // width)
    return mx.max(cells, axis=(2, 4)) if mode == "max" else mx.mean(cells, axis=(2, 4))


# Each cell of each box is a piece of the graph.
MAX_ROI_CELLS = 4096


@op("MaxRoiPool-1")
def max_roi_pool(x, rois: HostArray, *, pooled_shape, spatial_scale=1.0):
    """The largest element in each cell of each box, 0 of none: [boxes, channels, *pooled_shape]. ONNX MaxRoiPool-1, 22.

    x [batch, channels, h, w]; rois [boxes, 5] as image, x1, y1, x2, y2. Girshick 2015, Fast R-CNN.
    """
    height, width = pooled_shape
    if min(height, width) < 1 or height * width > MAX_ROI_CELLS:
        raise OperatorError(
            f"pooled_shape {list(pooled_shape)}", f"sizes of at least 1, of {MAX_ROI_CELLS} cells in all"
        )
    results = []
    for image, *box in rois.tolist():
        x1, y1, x2, y2 = (math.floor(v * spatial_scale + 0.5) for v in box)
        rows = _roi_bins(y1, y2, height, x.shape[2])
        columns = _roi_bins(x1, x2, width, x.shape[3])
        cells = [
            mx.max(element(x, int(image))[:, top:bottom, left:right], axis=(1, 2))
            if bottom > top and right > left
            else mx.zeros(x.shape[1], x.dtype)
            for top, bottom in rows
            for left, right in columns
        ]
        results.append(mx.stack(cells, axis=1).reshape(x.shape[1], height, width))
    return mx.stack(results) if results else mx.zeros((0, x.shape[1], height, width), x.dtype)


def _roi_bins(start: int, end: int, cells: int, size: int) -> list[tuple[int, int]]:
    length = max(end - start + 1, 1) / cells
    edges = [(math.floor(i * length) + start, math.ceil((i + 1) * length) + start) for i in range(cells)]
    return [(min(max(low, 0), size), min(max(high, 0), size)) for low, high in edges]


@op("NonMaxSuppression-10")
def non_max_suppression(
    boxes: HostArray,
    scores: HostArray,
    max_output_boxes_per_class: HostArray = None,
    iou_threshold: HostArray = None,
    score_threshold: HostArray = None,
    *,
    center_point_box=0,
):
    """The selected boxes, best first, of which no two overlap too much: int64 [selected, 3] on the host.

    A selected box is (image, class, box). boxes [batch, boxes, 4] as y1, x1, y2, x2 or as x, y, width, height; scores
    [batch, classes, boxes]. ONNX NonMaxSuppression-10, 11.
    """
    max_count = 0 if max_output_boxes_per_class is None else int(max_output_boxes_per_class.item())
    overlap = 0.0 if iou_threshold is None else float(iou_threshold.item())
    selected = []
    first, second = boxes[..., :2], boxes[..., 2:]
    if center_point_box:
        first, second = first - second / 2, first + second / 2
    low, high = np.minimum(first, second), np.maximum(first, second)
    for image in range(scores.shape[0]):
        area = np.prod(high[image] - low[image], axis=-1)
        for kind in range(scores.shape[1]):
            chosen: list[int] = []
            for i in np.argsort(-scores[image, kind], kind="stable").tolist():
                if len(chosen) == max_count or (
                    score_threshold is not None and not scores[image, kind, i] > score_threshold.item()
                ):
                    break
                common = np.prod(
                    np.clip(
                        np.minimum(high[image, i], high[image, chosen]) - np.maximum(low[image, i], low[image, chosen]),
                        0,
                        None,
                    ),
                    axis=-1,
                )
                if not np.any(common > overlap * (area[i] + area[chosen] - common)):
                    chosen.append(i)
            selected += [[image, kind, i] for i in chosen]
    return np.array(selected, np.int64).reshape(-1, 3)
