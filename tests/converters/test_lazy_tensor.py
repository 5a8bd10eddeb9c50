"""Lazy tensors: what they become is read when it is used, whole or in rows."""

from __future__ import annotations

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.converters.onnx_reader import lazy_tensor
from mlx_transmuter.converters.onnx_reader.lazy_tensor import (
    LazyTensor,
    concatenate_tensors,
    shared_readers,
    stack_tensors,
)

DATA = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def tensor(data: np.ndarray = DATA) -> LazyTensor:
    return LazyTensor(data.dtype.name, data.shape, lambda: data)


def rows_of(tensor: LazyTensor) -> np.ndarray:
    """What the rows of a tensor are together; each array of them has whole rows."""
    rows = [*tensor.rows()]
    assert all(part.ndim == 2 and part.shape[1] == tensor.shape[-1] for part in rows)
    return np.concatenate(rows).reshape(tensor.shape)


@pytest.fixture(params=[1, 40, 2**22])
def rows_bytes(request, monkeypatch):
    monkeypatch.setattr(lazy_tensor, "ROWS_BYTES", request.param)
    return request.param


@pytest.mark.parametrize("axes", [None, (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_a_transposed_tensor_is_numpys(axes, rows_bytes):
    transposed, expected = tensor().transpose(axes), DATA.transpose(axes)
    assert transposed.shape == expected.shape
    for array in (transposed.read(), np.array(transposed.to_device()), rows_of(transposed)):
        np.testing.assert_array_equal(array, expected)


def test_a_reshaped_tensor_is_numpys(rows_bytes):
    for reshaped in (tensor().reshape((6, 4)), tensor().transpose().reshape((6, 4))):
        for array in (np.array(reshaped.to_device()), rows_of(reshaped)):
            np.testing.assert_array_equal(array, reshaped.read())


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0), (0, 2)])
def test_tensors_of_few_axes_have_rows(shape, rows_bytes):
    data = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    rows = [*tensor(data).rows()]
    np.testing.assert_array_equal(
        np.concatenate([np.zeros(0, np.int32), *(part.ravel() for part in rows)]), data.ravel()
    )


def test_rows_are_no_more_than_asked_for(monkeypatch):
    monkeypatch.setattr(lazy_tensor, "ROWS_BYTES", 2 * 4 * 4)
    assert [len(part) for part in tensor(DATA.reshape(6, 4)).rows()] == [2, 2, 2]
    assert [len(part) for part in tensor(DATA.reshape(4, 6)).transpose().rows()] == [2, 2, 2]


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_a_cast_tensor_has_the_rounded_elements(dtype, numpy_dtype):
    cast = tensor(DATA / 7).cast(dtype)
    assert cast.dtype == dtype
    assert cast.read().dtype == numpy_dtype
    np.testing.assert_array_equal(cast.read(), (DATA / 7).astype(numpy_dtype))
    np.testing.assert_array_equal(rows_of(cast), cast.read())
    empty = tensor(np.zeros((0, 4), np.float32)).cast(dtype)
    assert (empty.read().shape, empty.read().dtype) == ((0, 4), numpy_dtype)


def test_concatenated_and_stacked_tensors_are_numpys(rows_bytes):
    parts = [tensor(np.full((n, 2), n, np.float32)) for n in (1, 3, 2)]
    whole = concatenate_tensors(parts)
    assert (whole.shape, whole.read()[:, 0].tolist()) == ((6, 2), [1, 3, 3, 3, 2, 2])
    stack = stack_tensors([whole, whole.transpose().transpose()])
    np.testing.assert_array_equal(stack.read(), np.stack([whole.read()] * 2))
    wide = concatenate_tensors([stack, stack], axis=2)
    assert wide.shape == (2, 6, 4)
    np.testing.assert_array_equal(wide.read(), np.concatenate([stack.read()] * 2, 2))
    for made in (whole, stack, wide, concatenate_tensors([tensor(np.arange(3.0))] * 2)):
        np.testing.assert_array_equal(rows_of(made), made.read())


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
