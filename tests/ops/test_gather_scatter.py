"""Gathers and scatters against loops over NumPy arrays: negative indices, empty parts, every reduction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy_node import assert_node_gives, run_node

from mlx_transmuter.ops import OperatorError

SETTINGS = settings(max_examples=80, derandomize=True)
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


def arange_of_shape(shape):
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


def draw_indices(data, shape, size):
    """Draws indices into an axis of that size, some from its end."""
    return data.draw(hnp.arrays(np.int64, shape, elements=st.integers(-size, size - 1)))


@SETTINGS
@given(shapes, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3), st.data())
def test_gather(shape, index_shape, data):
    x, axis = arange_of_shape(shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    indices = draw_indices(data, index_shape, shape[axis])
    assert_node_gives("Gather", [x, indices], np.take(x, indices, axis=axis), {"axis": axis})


@SETTINGS
@given(shapes, st.data())
def test_gather_elements(shape, data):
    x, axis = arange_of_shape(shape), data.draw(st.integers(-len(shape), len(shape) - 1))
    wanted = [data.draw(st.integers(0, 5 if i == axis % len(shape) else n)) for i, n in enumerate(shape)]
    indices = draw_indices(data, tuple(wanted), shape[axis])
    expected = np.zeros(wanted, np.float32)
    for at in np.ndindex(*wanted):
        source = list(at)
        source[axis] = indices[at]
        expected[at] = x[tuple(source)]
    assert_node_gives("GatherElements", [x, indices], expected, {"axis": axis})


@SETTINGS
@given(shapes, st.data())
def test_gather_nd(shape, data):
    batch_dims = data.draw(st.integers(0, len(shape) - 1))
    k = data.draw(st.integers(1, len(shape) - batch_dims))
    middle = data.draw(st.lists(st.integers(0, 3), max_size=2))
    lead = (*shape[:batch_dims], *middle)
    columns = [draw_indices(data, lead, n) for n in shape[batch_dims : batch_dims + k]]
    indices = np.stack(columns, axis=-1)
    x = arange_of_shape(shape)
    expected = np.zeros((*lead, *shape[batch_dims + k :]), np.float32)
    for at in np.ndindex(*lead):
        expected[at] = x[(*at[:batch_dims], *indices[at])]
    assert_node_gives("GatherND", [x, indices], expected, {"batch_dims": batch_dims})


REDUCTIONS = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": max,
    "min": min,
}


@SETTINGS
@given(shapes, st.sampled_from(sorted(REDUCTIONS)), st.data())
def test_scatter_nd(shape, reduction, data):
    k = data.draw(st.integers(1, len(shape)))
    spots = list(np.ndindex(*shape[:k]))
    # Without a reduction a place is written once: ONNX leaves the rest undefined.
    chosen = data.draw(st.lists(st.sampled_from(spots), max_size=5, unique=reduction == "none"))
    x = arange_of_shape(shape)
    indices = np.array(chosen, np.int64).reshape(-1, k)
    flip = data.draw(hnp.arrays(bool, indices.shape))
    updates = -2 * arange_of_shape((len(chosen), *shape[k:]))
    expected = x.copy()
    for at, update in zip(chosen, updates, strict=True):
        for rest in np.ndindex(*shape[k:]):
            expected[(*at, *rest)] = REDUCTIONS[reduction](expected[(*at, *rest)], update[rest])
    signed = np.where(flip, indices - np.array(shape[:k]), indices)
    assert_node_gives("ScatterND", [x, signed, updates], expected, {"reduction": reduction}, tolerance=1e-6)


@SETTINGS
@given(shapes, st.sampled_from(sorted(REDUCTIONS)), st.data())
def test_scatter_elements(shape, reduction, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    along = axis % len(shape)
    wanted = tuple(data.draw(st.integers(0, n)) for n in shape)
    if reduction == "none":
        order = [
            data.draw(st.permutations(range(shape[along])))
            for _ in range(int(np.prod(wanted) // max(wanted[along], 1)))
        ]
        rows = np.array([row[: wanted[along]] for row in order], np.int64)
        moved = (*wanted[:along], *wanted[along + 1 :], wanted[along])
        indices = np.moveaxis(rows.reshape(moved), -1, along)
    else:
        indices = draw_indices(data, wanted, shape[along])
    x, updates = arange_of_shape(shape), -2 * arange_of_shape(wanted)
    expected = x.copy()
    for at in np.ndindex(*wanted):
        target = list(at)
        target[along] = indices[at]
        expected[tuple(target)] = REDUCTIONS[reduction](expected[tuple(target)], updates[at])
    assert_node_gives(
        "ScatterElements", [x, indices, updates], expected, {"axis": axis, "reduction": reduction}, tolerance=1e-6
    )


@SETTINGS
@given(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4), st.sampled_from(["linear", "circular"]), st.data())
def test_tensor_scatter(batch, count, room, mode, data):
    capacity = count + room
    x, updates = arange_of_shape((batch, 2, capacity, 3)), -arange_of_shape((batch, 2, count, 3))
    first = [data.draw(st.integers(0, 3 * capacity if mode == "circular" else room)) for _ in range(batch)]
    expected = x.copy()
    for row in range(batch):
        for i in range(count):
            expected[row, :, (first[row] + i) % capacity] = updates[row, :, i]
    assert_node_gives("TensorScatter", [x, updates, np.array(first, np.int64)], expected, {"mode": mode}, opset=24)
    assert_node_gives("TensorScatter", [x.swapaxes(1, 2), updates.swapaxes(1, 2), np.array(first, np.int64)], expected.swapaxes(1, 2),
         {"mode": mode, "axis": 1}, opset=24)  # fmt: skip


def test_compress_and_reverse():
    x = arange_of_shape((3, 4))
    assert_node_gives("Compress", [x, np.array([True, False, True])], x[[0, 2]], {"axis": 0})
    assert_node_gives("Compress", [x, np.array([False, True, False, False, False, True])], x.reshape(-1)[[1, 5]])
    lengths = np.array([1, 3, 0, 2], np.int64)
    expected = x.copy()
    for column, n in enumerate(lengths):
        expected[:n, column] = x[:n, column][::-1]
    assert_node_gives("ReverseSequence", [x, lengths], expected)
    assert_node_gives("ReverseSequence", [x.T, lengths], expected.T, {"batch_axis": 0, "time_axis": 1})


def test_known_indices_out_of_range_raise():
    with pytest.raises(OperatorError, match="indices from 3 to 3"):
        run_node("Gather", [np.zeros(3, np.float32), np.array([3])])
