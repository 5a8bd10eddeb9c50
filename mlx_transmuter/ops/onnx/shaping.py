"""Shapes: their sizes, and the same elements in another shape."""

import math

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.integer_ranges import same_range
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("Identity-1", integer_range=same_range)
def identity(x):
    """x itself. ONNX Identity-1 to 25."""
    return x


@op("Shape-1")
def shape(x, *, start=0, end=None):
    """The sizes of x's axes from start to end, int64 [r] on the host. ONNX Shape-1, 13, 15, 19, 21, 23, 24, 25."""
    return np.array(x.shape[start:end], np.int64)


@op("Size-1")
def size(x):
    """The number of x's elements, int64 [] on the host. ONNX Size-1, 13, 19, 21, 23, 24, 25."""
    return np.array(x.size, np.int64)


@op("Reshape-5", integer_range=same_range)
def reshape(x, shape: HostArray, *, allowzero=0):
    """x in that shape; -1 is inferred from the other sizes, 0 is x's own size unless allowzero.

    ONNX Reshape-5, 13, 14, 19, 21, 23, 24, 25.
    """
    sizes = [x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(shape.tolist())]
    if sizes.count(-1) == 1:
        rest = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = x.size // rest if rest else 0
    if math.prod(sizes) != x.size:
        raise OperatorError(f"the shape {shape.tolist()} for x {list(x.shape)}", f"a shape of {x.size} elements")
    return x.reshape(sizes)


@op("Flatten-9", integer_range=same_range)
def flatten(x, *, axis=1):
    """x as a matrix: the axes before `axis` its rows, the others its columns.

    ONNX Flatten-9, 11, 13, 21, 23, 24, 25.
    """
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@op("Transpose-1", integer_range=same_range)
def transpose(x, *, perm=None):
    """x with its axes in the order perm, or reversed. ONNX Transpose-1, 13, 21, 23, 24, 25."""
    return x.transpose(perm) if perm is not None else x.transpose()


@op("Unsqueeze-11", integer_range=same_range)
def unsqueeze_11(x, *, axes):
    """x with new axes of size 1 at the positions `axes` of the result. ONNX Unsqueeze-11."""
    rank = x.ndim + len(axes)
    return mx.expand_dims(x, sorted(axis % rank for axis in axes)) if axes else x


@op("Unsqueeze-13", integer_range=same_range)
def unsqueeze(x, axes: HostArray):
    """x with new axes of size 1 at the positions axes, int64 [r], of the result. ONNX Unsqueeze-13, 21, 23, 24, 25."""
    return unsqueeze_11(x, axes=axes.reshape(-1).tolist())


@op("Squeeze-11", integer_range=same_range)
def squeeze_11(x, *, axes=None):
    """x without the axes `axes`, of size 1; without all such axes if None. ONNX Squeeze-11."""
    if axes is None:
        return x.squeeze()
    return x.squeeze(tuple(axes)) if axes else x


@op("Squeeze-13", integer_range=same_range)
def squeeze(x, axes: HostArray = None):
    """x without the axes, int64 [r], of size 1; without all such axes if None. ONNX Squeeze-13, 21, 23, 24, 25."""
    return squeeze_11(x, axes=None if axes is None else axes.reshape(-1).tolist())


@op("Expand-8", integer_range=same_range)
def expand(x, shape: HostArray):
    """x broadcast with shape, int64 [r]; a 1 in shape keeps x's size. ONNX Expand-8, 13."""
    return mx.broadcast_to(x, np.broadcast_shapes(tuple(x.shape), tuple(shape.tolist())))


@op("Tile-6", integer_range=same_range)
def tile(x, repeats: HostArray):
    """x repeated, repeats int64 [rank] times along each axis. ONNX Tile-6, 13."""
    if 0 in (counts := repeats.tolist()):
        return mx.zeros([n * count for n, count in zip(x.shape, counts, strict=True)], x.dtype)
    return mx.tile(x, counts)


@op("DepthToSpace-1")
def depth_to_space(x, *, blocksize, mode="DCR"):
    """[batch, b * b * c, h, w] to [batch, c, h * b, w * b]; the channels lie depth, column, row or column, row, depth.

    ONNX DepthToSpace-1, 11, 13, 28.
    """
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        x = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    elif mode == "CRD":
        x = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    else:
        raise OperatorError(f"the mode {mode!r}", "DCR or CRD")
    return x.reshape(n, c // (b * b), h * b, w * b)


@op("SpaceToDepth-1")
def space_to_depth(x, *, blocksize, mode="DCR"):
    """[batch, c, h * b, w * b] to [batch, b * b * c, h, w], the inverse of DepthToSpace.

    ONNX SpaceToDepth-1, 13, 28.
    """
    n, c, h, w = x.shape
    b = blocksize
    if mode not in ("DCR", "CRD"):
        raise OperatorError(f"the mode {mode!r}", "DCR or CRD")
    x = x.reshape(n, c, h // b, b, w // b, b)
    x = x.transpose(0, 3, 5, 1, 2, 4) if mode == "DCR" else x.transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(n, c * b * b, h // b, w // b)
