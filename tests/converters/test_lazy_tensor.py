"""Lazy tensors: what they become is read when it is used, and each remembers the tensors that it was made of."""

from __future__ import annotations

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.converters.onnx_reader.lazy_tensor import (
    LazyTensor,
    concatenate_tensors,
    shared_readers,
    stack_tensors,
)

DATA = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def tensor(data: np.ndarray = DATA) -> LazyTensor:
    return LazyTensor(data.dtype.name, data.shape, lambda: data)


@pytest.mark.parametrize("axes", [None, (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_a_transposed_tensor_gives_the_original_back(axes):
    source = tensor()
    transposed = source.transpose(axes)
    expected = DATA.transpose(axes)
    assert transposed.shape == expected.shape
    np.testing.assert_array_equal(transposed.read(), expected)
    ((component, view),) = transposed.components
    assert component is source
    np.testing.assert_array_equal(np.array(view(transposed.to_device())), DATA)


def test_a_reshaped_tensor_gives_the_original_back():
    source = tensor()
    reshaped = source.reshape((6, 4))
    np.testing.assert_array_equal(reshaped.read(), DATA.reshape(6, 4))
    ((component, view),) = reshaped.components
    assert component is source
    np.testing.assert_array_equal(np.array(view(reshaped.to_device())), DATA)


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_a_cast_tensor_has_the_rounded_elements(dtype, numpy_dtype):
    cast = tensor(DATA / 7).cast(dtype)
    assert cast.dtype == dtype
    assert cast.read().dtype == numpy_dtype
    np.testing.assert_array_equal(cast.read(), (DATA / 7).astype(numpy_dtype))
    assert not cast.components


def test_concatenated_and_stacked_tensors_have_the_originals_as_components():
    parts = [tensor(np.full((n, 2), n, np.float32)) for n in (1, 3, 2)]
    whole = concatenate_tensors(parts)
    assert (whole.shape, whole.read()[:, 0].tolist()) == ((6, 2), [1, 3, 3, 3, 2, 2])
    stack = stack_tensors([whole, whole.transpose().transpose()])
    np.testing.assert_array_equal(stack.read(), np.stack([whole.read()] * 2))
    wide = concatenate_tensors([stack, stack], axis=2)
    assert wide.shape == (2, 6, 4)
    for made in (whole, stack, wide):
        for part, view in made.components:
            np.testing.assert_array_equal(np.array(view(made.to_device())), part.read())


def test_nothing_is_read_before_it_is_used():
    def refuse() -> np.ndarray:
        raise AssertionError("the data was read")

    source = LazyTensor("float32", (2, 3), refuse)
    derived = [source.transpose(), source.reshape((3, 2)), source.cast("float16"), stack_tensors([source] * 2)]
    derived.append(concatenate_tensors([source, source]))
    assert [one.size for one in derived] == [6, 6, 6, 12, 12]
    for one in derived:
        with pytest.raises(AssertionError, match="the data was read"):
            one.read()


def test_shared_readers_compute_their_arrays_once_a_turn():
    calls = []

    def compute() -> tuple[mx.array, ...]:
        calls.append(None)
        return mx.array([1, 2]), mx.array([3])

    first, second = shared_readers(compute, 2)
    assert (first().tolist(), second().tolist(), len(calls)) == ([1, 2], [3], 1)
    assert (first().tolist(), len(calls)) == ([1, 2], 2)
