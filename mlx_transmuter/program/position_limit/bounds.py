"""Bounds: what is known of a value of a program before it runs: the range of its integers and its shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlx_transmuter.program.position_limit.lengths import ONE, Length, larger, smaller

# The most elements of a value that are followed one by one: shapes, axes and what is computed from them.
MAX_ELEMENTS = 64

Shape = tuple[Length | None, ...]


class Comparison(NamedTuple):
    """What a boolean value says: that left is below right (strict), or at most right."""

    left: str
    right: str
    strict: bool


class Bounds(NamedTuple):
    """What is known of a value; None is unknown throughout.

    low, high: bounds of all elements of a value of integers. shape: its sizes. elements: the elements themselves of a
    vector or a scalar. comparison: what a true element means.
    """

    low: Length | None = None
    high: Length | None = None
    shape: Shape | None = None
    elements: Shape | None = None
    comparison: Comparison | None = None

    @staticmethod
    def from_array(array: np.ndarray) -> Bounds:
        """Returns what is known of a constant."""
        shape = sizes(array.shape)
        if not array.size or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            return Bounds(shape=shape)
        if array.dtype.kind == "f" and (array % 1).any():
            return Bounds(shape=shape)
        low, high = (Length(constant=int(number)) for number in (array.min(), array.max()))
        is_short = array.ndim < 2 and array.size <= MAX_ELEMENTS
        return Bounds(low, high, shape, sizes(array.reshape(-1)) if is_short else None)

    @staticmethod
    def from_elements(elements: Sequence[Length | None], *, scalar: bool = False) -> Bounds:
        """Returns what is known of a vector, or a scalar, of these elements."""
        low = high = elements[0] if elements else None
        for element in elements[1:]:
            low, high = smaller(low, element), larger(high, element)
        return Bounds(low, high, () if scalar else sizes([len(elements)]), tuple(elements))

    @property
    def as_constant(self) -> int | None:
        """The one element, where it is known and the same in all steps."""
        if self.elements is None or len(self.elements) != 1 or self.elements[0] is None:
            return None
        return self.elements[0].as_constant

    @property
    def as_constants(self) -> list[int] | None:
        """The elements, where all are known and the same in all steps."""
        if self.elements is None:
            return None
        numbers = [None if element is None else element.as_constant for element in self.elements]
        return None if None in numbers else numbers  # type: ignore[return-value]

    @property
    def is_scalar(self) -> bool:
        """Whether it is known to have no axes."""
        return self.shape == ()

    def size(self, axis: int) -> Length | None:
        """Returns the size of an axis."""
        if self.shape is None or not -len(self.shape) <= axis < len(self.shape):
            return None
        return self.shape[axis]

    def with_shape(self, shape: Shape | None) -> Bounds:
        """Returns the bounds of the same elements, or some of them, in another shape."""
        is_whole = self.elements is not None and shape in ((), sizes([len(self.elements)]))
        return Bounds(self.low, self.high, shape, self.elements if is_whole else None)

    def limit(self) -> Bounds:
        """Returns the bounds without a shape or elements of more than MAX_ELEMENTS."""
        shape, elements = (None if each is None or len(each) > MAX_ELEMENTS else each for each in self[2:4])
        return self._replace(shape=shape, elements=elements)

    def map(self, function: Callable[[Length], Length | None]) -> Bounds:
        """Returns what is known after a function of each element that keeps their order."""
        low, high = (None if bound is None else function(bound) for bound in (self.low, self.high))
        elements = self.elements and tuple(None if each is None else function(each) for each in self.elements)
        return Bounds(low, high, self.shape, elements)


UNKNOWN = Bounds()


def sizes(numbers: Sequence[int] | np.ndarray) -> Shape:
    """Returns constant sizes."""
    return tuple(Length(constant=int(number)) for number in numbers)


def join(a: Bounds, b: Bounds) -> Bounds:
    """Returns what is known of a value that is one of the two."""
    shape = None
    if a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape):
        shape = tuple(x if x == y else None for x, y in zip(a.shape, b.shape, strict=True))
    return Bounds(
        smaller(a.low, b.low), larger(a.high, b.high), shape, a.elements if a.elements == b.elements else None
    )


def broadcast(a: Shape | None, b: Shape | None) -> Shape | None:
    """Returns the shape of two values computed together, by ONNX's rules."""
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    a, b = ((ONE,) * (rank - len(shape)) + shape for shape in (a, b))
    return tuple(_broadcast_size(x, y) for x, y in zip(a, b, strict=True))


def _broadcast_size(a: Length | None, b: Length | None) -> Length | None:
    if a == ONE:
        return b
    return a if b in (ONE, a) else None
