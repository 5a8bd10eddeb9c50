"""Sequences, which are Python lists of arrays, and optionals, which are their element or None."""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.onnx.slicing import split_by_sizes
from mlx_transmuter.ops.registry import HostArray, OperatorError, op


@op("SequenceConstruct-11")
def sequence_construct(*xs):
    """The inputs as a sequence. ONNX SequenceConstruct-11."""
    return list(xs)


@op("SequenceEmpty-11")
def sequence_empty(*, dtype=1):
    """An empty sequence. ONNX SequenceEmpty-11."""
    return []


@op("SequenceAt-11")
def sequence_at(sequence, position: HostArray):
    """The element at position, a scalar, from the end if negative. ONNX SequenceAt-11."""
    return sequence[int(position.item())]


@op("SequenceInsert-11")
def sequence_insert(sequence, x, position: HostArray = None):
    """The sequence with x before the element at position, or at the end. ONNX SequenceInsert-11."""
    i = len(sequence) if position is None else int(position.item())
    return [*sequence[:i], x, *sequence[i:]]


@op("SequenceErase-11")
def sequence_erase(sequence, position: HostArray = None):
    """The sequence without the element at position, or without the last. ONNX SequenceErase-11."""
    i = range(len(sequence))[-1 if position is None else int(position.item())]
    return [*sequence[:i], *sequence[i + 1 :]]


@op("SequenceLength-11")
def sequence_length(sequence):
    """The number of elements, int64 [] on the host. ONNX SequenceLength-11."""
    return np.array(len(sequence), np.int64)


@op("SplitToSequence-11")
def split_to_sequence(x, split: HostArray = None, *, axis=0, keepdims=1):
    """x in parts along `axis`: single elements (without the axis if not keepdims), or of the size or sizes split.

    ONNX SplitToSequence-11, 24.
    """
    size = x.shape[axis]
    if split is None:
        parts = mx.split(x, size, axis=axis) if size else []
        return [part if keepdims else part.squeeze(axis) for part in parts]
    if split.ndim:
        return list(split_by_sizes(x, split.tolist(), axis))
    part = split.item()
    if part < 1:
        raise OperatorError(f"parts of {part}", "a size of at least 1")
    return list(mx.split(x, list(range(min(part, size), size, part)), axis=axis))


@op("ConcatFromSequence-11")
def concat_from_sequence(sequence, *, axis, new_axis=0):
    """The elements one after another along `axis`, or along a new one. ONNX ConcatFromSequence-11."""
    return mx.stack(sequence, axis=axis) if new_axis else mx.concatenate(sequence, axis=axis)


@op("Optional-15")
def optional(x=None):
    """x, or an empty optional. ONNX Optional-15, 28."""
    return x


@op("OptionalGetElement-15")
def optional_get_element(x):
    """The element of the optional; any other value as it is. ONNX OptionalGetElement-15, 18, 28."""
    return x


@op("OptionalHasElement-15")
def optional_has_element(x=None):
    """Whether there is an element, bool [] on the host. ONNX OptionalHasElement-15, 18, 28."""
    return np.array(x is not None)
