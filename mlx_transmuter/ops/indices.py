"""Indices: integers that index an axis, and the range that they are known to be in while a step is traced.

MLX checks no index: one out of range reads or writes whatever lies there, or ends the process. So every index of a
device goes through here (see functional/indexing.py), where it is clipped, unless its range proves that it needs no
clipping.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class IntegerRange(NamedTuple):
    """All integers from low to high, both included."""

    low: int
    high: int

    def is_within(self, low: int, high: int) -> bool:
        """Returns whether all of them lie from low to high."""
        return low <= self.low and self.high <= high

    def shift(self, by: int) -> "IntegerRange":
        """Returns the range of the integers plus `by`."""
        return IntegerRange(self.low + by, self.high + by)

    def clip(self, low: int, high: int) -> "IntegerRange":
        """Returns the range of the integers, those outside low to high replaced by the nearest."""
        return IntegerRange(min(max(self.low, low), high), min(max(self.high, low), high))


@dataclass(frozen=True)
class Indices:
    """Annotation of an input that indexes an axis; the function gets its integers, as a numpy array where they are
    known while a step is traced, and their range, None where nothing is known of it.

    The operator's function may be called with the bare array as well: see `of`.
    """

    array: mx.array | np.ndarray
    range: IntegerRange | None = None

    @staticmethod
    def of(indices: "Indices | mx.array | np.ndarray") -> "Indices":
        """Returns the indices; bare ones have the range of their type, or of their values where those are known."""
        return indices if isinstance(indices, Indices) else Indices(indices, range_of_array(indices))

    @staticmethod
    def between(array: mx.array, low: int, high: int) -> "Indices":
        """Returns indices of which the caller knows that all are from low to high, by how they are computed."""
        return Indices(array, IntegerRange(low, high))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of axes of the array."""
        return len(self.shape)

    def on_last_axis(self, number: int) -> "Indices":
        """Returns the indices with that number on the last axis."""
        part = self.array[..., number]
        return Indices.of(part) if isinstance(part, np.ndarray) else Indices(part, self.range)

    def reshape(self, *shape: int) -> "Indices":
        """Returns the indices in another shape."""
        return Indices(self.array.reshape(*shape), self.range)


def range_of_array(array: mx.array | np.ndarray) -> IntegerRange | None:
    """Returns the range of the integers of an array: of its values where they are known, else of its type.

    None for a type of 32 bits or more, which may hold any index, and for one that holds no integers.
    """
    if isinstance(array, np.ndarray):
        is_integer = array.dtype.kind in "iub" and array.size
        return IntegerRange(int(array.min()), int(array.max())) if is_integer else None
    if array.dtype == mx.bool_:
        return IntegerRange(0, 1)
    if mx.issubdtype(array.dtype, mx.integer) and array.dtype.size < 4:
        limits = mx.iinfo(array.dtype)
        return IntegerRange(limits.min, limits.max)
    return None
