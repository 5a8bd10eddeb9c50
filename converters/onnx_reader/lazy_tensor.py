"""Tensors whose data is read when it is used, so that a conversion never holds all weights of a file at once."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401 numpy then knows "bfloat16"
import mlx.core as mx
import numpy as np

from mlx_transmuter.ops import to_device
from mlx_transmuter.precision_options import FLOAT_DTYPES

# The ONNX types that weights of a layer may have: those that a conversion may give them.
LAYER_FLOAT_TYPES = FLOAT_DTYPES


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose data is read each time it is asked for.

    dtype: the name of its ONNX type. shape: its sizes. read: returns the data as a numpy array of that shape, with
    ml_dtypes' types for bfloat16 and 8-bit floats, and with an integer of 2 or 4 bits in a byte. components: the
    tensors that this one was made of, each with the function that takes it out of an `mx.array` of this one.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    components: tuple[tuple[LazyTensor, Callable[[mx.array], mx.array]], ...] = ()

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def to_device(self) -> mx.array:
        """Reads the data into an `mx.array`."""
        return to_device(np.ascontiguousarray(self.read()).reshape(self.shape))

    def transpose(self, axes: Sequence[int] | None = None) -> LazyTensor:
        """Returns the tensor with its axes in that order, or reversed."""
        order = tuple(range(len(self.shape)))[::-1] if axes is None else tuple(axes)
        inverse = tuple(int(axis) for axis in np.argsort(order))
        shape = tuple(self.shape[axis] for axis in order)
        view = (self, lambda array: array.transpose(inverse))
        return LazyTensor(self.dtype, shape, lambda: self.read().transpose(order), (view,))

    def reshape(self, shape: Sequence[int]) -> LazyTensor:
        """Returns the tensor with its elements, in their order, in a shape of as many."""
        view = (self, lambda array: array.reshape(self.shape))
        return LazyTensor(self.dtype, tuple(shape), lambda: self.read().reshape(shape), (view,))

    def cast(self, dtype: str) -> LazyTensor:
        """Returns the tensor with its elements rounded to another type that numpy or ml_dtypes has."""
        return LazyTensor(dtype, self.shape, lambda: self.read().astype(np.dtype(dtype)))


def concatenate_tensors(tensors: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Returns the tensors one after the other along the axis."""
    sizes = [tensor.shape[axis] for tensor in tensors]
    ends = itertools.accumulate(sizes)
    places = [(*[slice(None)] * axis, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    components = tuple((tensor, operator.itemgetter(place)) for tensor, place in zip(tensors, places, strict=True))
    shape = (*tensors[0].shape[:axis], sum(sizes), *tensors[0].shape[axis + 1 :])
    return LazyTensor(
        tensors[0].dtype, shape, lambda: np.concatenate([tensor.read() for tensor in tensors], axis), components
    )


def stack_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Returns the tensors side by side along a new first axis."""
    components = tuple((tensor, operator.itemgetter(i)) for i, tensor in enumerate(tensors))
    shape = (len(tensors), *tensors[0].shape)
    return LazyTensor(tensors[0].dtype, shape, lambda: np.stack([tensor.read() for tensor in tensors]), components)


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
