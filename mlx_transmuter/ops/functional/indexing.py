"""Indices into an axis, and the shapes of vectors along one."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import OperatorError
from mlx_transmuter.ops.types import to_device


def checked_indices(indices: mx.array | np.ndarray, size: int) -> mx.array:
    """Returns the indices into an axis of that size on the device.

    Raises OperatorError for indices that are known while a step is traced and out of range: MLX would read undefined
    memory or end the process.
    """
    if isinstance(indices, mx.array):
        return indices
    if indices.size and not -size <= indices.min() <= indices.max() < size:
        raise OperatorError(f"indices from {indices.min()} to {indices.max()}", f"indices from {-size} to {size - 1}")
    return to_device(indices)


def wrap_negative_indices(indices: mx.array, size: int) -> mx.array:
    """Returns the indices with those below 0, which count from the end of an axis of that size, made positive."""
    return mx.where(indices < 0, indices + size, indices)


def axis_shape(axis: int, rank: int, size: int = -1) -> list[int]:
    """Returns the shape by which a vector lies along `axis` of an array of that rank: `size` there, 1 elsewhere."""
    return [size if i == axis % rank else 1 for i in range(rank)]
