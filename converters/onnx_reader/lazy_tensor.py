"""Tensors whose data is read when it is used, so that a conversion never holds all weights of a file at once."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops import to_device

# The float types that weights of a layer may have.
LAYER_FLOAT_TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose data is read when asked for, so that a conversion holds one weight more than the file, not all
    twice.

    dtype: the ONNX type's name. shape: its shape. read: gives the data as a numpy array of that shape (bfloat16 and the
    like as ml_dtypes has them; 4-bit integers one a byte). holds: the tensors that this one was made of, each with a
    view of it in this one's array.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    components: tuple[tuple[LazyTensor, Callable[[mx.array], mx.array]], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_device(self) -> mx.array:
        """The data as an `mx.array`, read now."""
        return to_device(np.ascontiguousarray(self.read()).reshape(self.shape))

    def transpose(self) -> LazyTensor:
        """The tensor with its axes in reverse order."""
        return self.permute_axes(tuple(range(len(self.shape)))[::-1])

    def permute_axes(self, axes: tuple[int, ...]) -> LazyTensor:
        """The tensor with its axes in another order, one that undoes itself."""
        shape = tuple(self.shape[axis] for axis in axes)
        return LazyTensor(
            self.dtype, shape, lambda: self.read().transpose(axes), ((self, lambda a: a.transpose(axes)),)
        )


def concatenate_tensors(tensors: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """The tensors one after the other along the axis."""
    sizes = [one.shape[axis] for one in tensors]
    ends = itertools.accumulate(sizes)
    rows = [(*[slice(None)] * axis, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    holds = tuple((one, operator.itemgetter(part)) for one, part in zip(tensors, rows, strict=True))
    shape = (*tensors[0].shape[:axis], sum(sizes), *tensors[0].shape[axis + 1 :])
    return LazyTensor(tensors[0].dtype, shape, lambda: np.concatenate([one.read() for one in tensors], axis), holds)


def stack_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """The tensors side by side along a new first axis."""
    holds = tuple((one, operator.itemgetter(i)) for i, one in enumerate(tensors))
    shape = (len(tensors), *tensors[0].shape)
    return LazyTensor(tensors[0].dtype, shape, lambda: np.stack([one.read() for one in tensors]), holds)


def shared_readers(compute: Callable[[], tuple[mx.array, ...]], count: int) -> list[Callable[[], np.ndarray]]:
    """A function for each of the arrays that `make` gives. It runs once where they are asked for one after the other;
    what nobody has asked for yet is all that is kept of it.
    """
    left: dict[int, mx.array] = {}

    def part(at: int) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            if at not in left:
                left.update(enumerate(compute()))
                mx.eval(list(left.values()))
            return np.array(left.pop(at))

        return read

    return [part(at) for at in range(count)]
