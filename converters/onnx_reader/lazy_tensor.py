"""Tensors whose data is read when it is used, so that a conversion never holds all weights of a file at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 numpy then knows "bfloat16"
import mlx.core as mx
import numpy as np

from mlx_transmuter.ops import to_device
from mlx_transmuter.precision_options import FLOAT_DTYPES

# The ONNX types that weights of a layer may have: those that a conversion may give them.
LAYER_FLOAT_TYPES = FLOAT_DTYPES
# The most bytes of the rows of a tensor that are read together, but for a single row that is larger.
ROWS_BYTES = 2**22


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose data is read each time it is asked for.

    dtype: the name of its ONNX type. shape: its sizes. read: returns the data as a numpy array of that shape, with
    ml_dtypes' types for bfloat16 and 8-bit floats, and with an integer of 2 or 4 bits in a byte; of data in a file it
    is a view of the mapped file. read_in_rows: reads the data as `rows` does; None for what `read` returns, in rows.
    read_to_device: reads the data into an `mx.array`; None for a copy of what `read` returns.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    read_in_rows: Callable[[], Iterator[np.ndarray]] | None = None
    read_to_device: Callable[[], mx.array] | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def rows(self) -> Iterator[np.ndarray]:
        """Yields the data in its order as arrays [n, columns] of whole rows, the tensor's last axis, so that no more
        than one of them is in memory.
        """
        return self.read_in_rows() if self.read_in_rows is not None else _split_rows(self.read())

    def to_device(self) -> mx.array:
        """Reads the data into an `mx.array`."""
        if self.read_to_device is not None:
            return self.read_to_device()
        return to_device(np.ascontiguousarray(self.read()).reshape(self.shape))

    def transpose(self, axes: Sequence[int] | None = None) -> LazyTensor:
        """Returns the tensor with its axes in that order, or reversed. In an `mx.array` it is a view."""
        order = tuple(range(len(self.shape)))[::-1] if axes is None else tuple(axes)
        shape = tuple(self.shape[axis] for axis in order)
        return LazyTensor(
            self.dtype,
            shape,
            lambda: self.read().transpose(order),
            read_to_device=lambda: self.to_device().transpose(order),
        )

    def reshape(self, shape: Sequence[int]) -> LazyTensor:
        """Returns the tensor with its elements, in their order, in a shape of as many."""
        return LazyTensor(
            self.dtype,
            tuple(shape),
            lambda: self.read().reshape(shape),
            read_to_device=lambda: self.to_device().reshape(shape),
        )

    def map_rows(self, dtype: str, function: Callable[[np.ndarray], np.ndarray]) -> LazyTensor:
        """Returns the tensor of another type whose rows [n, columns] are the function's of this one's."""

        def read_in_rows() -> Iterator[np.ndarray]:
            return map(function, self.rows())

        def read() -> np.ndarray:
            return np.concatenate([*read_in_rows()] or [function(self.read())]).reshape(self.shape)

        return LazyTensor(dtype, self.shape, read, read_in_rows)

    def cast(self, dtype: str) -> LazyTensor:
        """Returns the tensor with its elements rounded to another type that numpy or ml_dtypes has."""
        return self.map_rows(dtype, lambda rows: rows.astype(np.dtype(dtype)))


def _split_rows(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array's rows, its last axis, in arrays of up to ROWS_BYTES; views, where the array is one."""
    if not array.size:
        return
    if array.ndim > 2 and not array.flags.c_contiguous:
        for part in array:
            yield from _split_rows(part)
        return
    columns = array.shape[-1] if array.ndim else 1
    array = array.reshape(-1, columns)
    count = max(1, ROWS_BYTES // (columns * array.itemsize))
    yield from (array[begin : begin + count] for begin in range(0, len(array), count))


def concatenate_tensors(tensors: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Returns the tensors one after the other along the axis."""
    first = tensors[0]
    shape = (*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :])

    def read() -> np.ndarray:
        return np.concatenate([tensor.read() for tensor in tensors], axis)

    return LazyTensor(first.dtype, shape, read, _chained_rows(tensors) if axis == 0 and len(shape) > 1 else None)


def stack_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Returns the tensors side by side along a new first axis."""
    first = tensors[0]
    shape = (len(tensors), *first.shape)

    def read() -> np.ndarray:
        return np.stack([tensor.read() for tensor in tensors])

    return LazyTensor(first.dtype, shape, read, _chained_rows(tensors))


def _chained_rows(tensors: Sequence[LazyTensor]) -> Callable[[], Iterator[np.ndarray]]:
    return lambda: itertools.chain.from_iterable(tensor.rows() for tensor in tensors)


def shared_readers(compute: Callable[[], tuple[mx.array, ...]], count: int) -> list[Callable[[], np.ndarray]]:
    """Returns a reader for each of the `count` arrays that `compute` returns.

    `compute` runs once where the readers are called in turn. An array is kept only until its reader has been called.
    """
    pending: dict[int, mx.array] = {}

    def reader(index: int) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            if index not in pending:
                pending.update(enumerate(compute()))
                mx.eval(list(pending.values()))
            return np.array(pending.pop(index))

        return read

    return [reader(index) for index in range(count)]
