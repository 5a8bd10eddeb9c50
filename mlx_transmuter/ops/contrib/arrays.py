"""Shape and index operators of com.microsoft, most of which are older versions of ONNX's own."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.functional.indexing import take
from mlx_transmuter.ops.indices import Indices
from mlx_transmuter.ops.integer_ranges import same_range
from mlx_transmuter.ops.onnx.creation import range_
from mlx_transmuter.ops.onnx.gather_scatter import gather_nd
from mlx_transmuter.ops.onnx.image_sampling import grid_sample
from mlx_transmuter.ops.onnx.ordering import unique
from mlx_transmuter.ops.onnx.slicing import pad, trilu
from mlx_transmuter.ops.registry import HostArray, op


@op("com.microsoft.ExpandDims-1")
def expand_dims(x, axis: HostArray):
    """x with a new axis of size 1 at axis, a scalar. com.microsoft ExpandDims-1."""
    return mx.expand_dims(x, int(axis.item()))


@op("com.microsoft.Trilu-1")
def trilu_1(x, k: HostArray = None, *, upper: int = 1):
    """ONNX's Trilu. com.microsoft Trilu-1."""
    return trilu(x, k, upper=upper)


@op("com.microsoft.Pad-1")
def pad_1(x, pads: HostArray, value=None, *, mode: str = "constant"):
    """ONNX's Pad over all axes, pads being [2 · rank] or [1, 2 · rank]. com.microsoft Pad-1."""
    return pad(x, pads.reshape(-1), value, mode=mode)


@op("com.microsoft.GatherND-1", integer_range=same_range)
def gather_nd_1(x, indices: Indices):
    """ONNX's GatherND without batch axes. com.microsoft GatherND-1."""
    return gather_nd(x, indices)


@op("com.microsoft.Range-1")
def range_1(start: HostArray, limit: HostArray, delta: HostArray = None):
    """ONNX's Range, delta being 1 where absent. com.microsoft Range-1."""
    return range_(start, limit, np.ones_like(start) if delta is None else delta)


@op("com.microsoft.Unique-1")
def unique_1(x: HostArray):
    """The different elements of x [n] by first place, each element's class, and counts. com.microsoft Unique-1."""
    y, _, inverse, counts = unique(x, sorted=0, outputs=4)
    return y, inverse, counts


@op("com.microsoft.TorchEmbedding-1")
def torch_embedding(weight, indices: Indices, padding_idx=None, scale_grad_by_freq=None):
    """The rows of weight [rows, dim] at indices; the other inputs are for gradients. com.microsoft TorchEmbedding-1."""
    return take(weight, indices)


@op("com.microsoft.Inverse-1")
def inverse(x):
    """The inverses of the matrices x [..., n, n], on the CPU, where MLX has them. com.microsoft Inverse-1."""
    return mx.linalg.inv(x.astype(mx.float32), stream=mx.cpu).astype(x.dtype)


@op("com.microsoft.GridSample-1")
def grid_sample_1(x, grid, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"):
    """ONNX's GridSample. com.microsoft GridSample-1."""
    return grid_sample(x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@op("com.microsoft.UnfoldTensor-1")
def unfold_tensor(x, *, size: int, dim: int = -1, step: int = 1):
    """The slices of size elements of x along dim, one each step, on a new last axis. com.microsoft UnfoldTensor-1."""
    dim %= x.ndim
    firsts = np.arange(0, x.shape[dim] - size + 1, step)
    places = firsts[:, None] + np.arange(size)
    return mx.moveaxis(take(x, places, axis=dim), dim + 1, -1)
