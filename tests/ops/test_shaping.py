"""Shapes, slices, splits and padding against NumPy: INT64 extremes, negative steps, empty arrays."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy_node import assert_node_gives, run_node

from mlx_transmuter.ops import OperatorError

SETTINGS = settings(max_examples=80, derandomize=True)
INT64 = np.iinfo(np.int64)
bounds = st.one_of(st.integers(-7, 7), st.sampled_from([INT64.min, INT64.min + 1, INT64.max, 2**31, -(2**31) - 1]))
arrays = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4).map(
    lambda shape: np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
)


def int64_array(*values):
    return np.array(values, np.int64)


@SETTINGS
@given(arrays, st.data())
def test_slices(x, data):
    axes = data.draw(st.permutations(range(x.ndim)).flatmap(lambda p: st.integers(1, x.ndim).map(lambda n: p[:n])))
    cut = [
        data.draw(st.tuples(bounds, bounds, st.sampled_from([1, 2, 3, -1, -2, -3, INT64.max, INT64.min + 1])))
        for _ in axes
    ]
    places = [slice(None)] * x.ndim
    for axis, (start, end, step) in zip(axes, cut, strict=True):
        # ONNX's end below -size of a backward slice means "to the beginning", as NumPy's does.
        places[axis] = slice(start, end, step)
    signed = [axis - x.ndim if data.draw(st.booleans()) else axis for axis in axes]
    starts, ends, steps = (int64_array(*column) for column in zip(*cut, strict=True))
    assert_node_gives("Slice", [x, starts, ends, int64_array(*signed), steps], x[tuple(places)])


def test_slice_defaults():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    assert_node_gives("Slice", [x, int64_array(1, 0), int64_array(2, -1)], x[1:2, 0:-1])


@SETTINGS
@given(arrays, st.data())
def test_reshape_with_zero_and_minus_one(x, data):
    assume(x.size)
    order = data.draw(st.permutations(range(x.ndim)))
    sizes = [x.shape[i] for i in order]
    hole = data.draw(st.integers(0, x.ndim - 1))
    shape = list(sizes)
    shape[hole] = -1
    # A 0 keeps the size at that place, so it stands only where the size is already there.
    shape = [0 if i != hole and n == x.shape[i] and data.draw(st.booleans()) else n for i, n in enumerate(shape)]
    assert_node_gives("Reshape", [x, int64_array(*shape)], x.reshape(sizes))


def test_reshape_of_empty_arrays():
    x = np.zeros((0, 3), np.float32)
    assert_node_gives("Reshape", [x, int64_array(3, 0)], np.zeros((3, 0), np.float32), {"allowzero": 1})
    assert_node_gives("Reshape", [x, int64_array(0, -1)], np.zeros((0, 0), np.float32))
    assert_node_gives("Reshape", [np.float32(5).reshape(1), int64_array()], np.float32(5))


def test_a_shape_of_another_size_raises():
    with pytest.raises(OperatorError, match=r"\[4\] for x \[2, 3\]"):
        run_node("Reshape", [np.zeros((2, 3), np.float32), int64_array(4)])


@SETTINGS
@given(arrays, st.data())
def test_squeeze_undoes_unsqueeze(x, data):
    rank = x.ndim + data.draw(st.integers(0, 2))
    axes = data.draw(st.permutations(range(rank)))[: rank - x.ndim]
    signed = [axis - rank if data.draw(st.booleans()) else axis for axis in axes]
    wide = np.expand_dims(x, tuple(axes)) if axes else x
    for opset, inputs, attrs in ((13, [x, int64_array(*signed)], {}), (11, [x], {"axes": signed})):
        assert_node_gives("Unsqueeze", inputs, wide, attrs, opset=opset)
        if axes:
            assert_node_gives("Squeeze", [wide, *inputs[1:]], x, attrs, opset=opset)
    assert_node_gives("Squeeze", [wide], np.squeeze(wide))


@SETTINGS
@given(arrays, st.data())
def test_expand_and_tile(x, data):
    target = [n if n != 1 else data.draw(st.integers(0, 3)) for n in x.shape]
    lead = data.draw(st.lists(st.integers(0, 2), max_size=2))
    # A 1 in the shape keeps the array's size.
    asked = [1 if data.draw(st.booleans()) and n == m else n for n, m in zip(target, x.shape, strict=True)]
    expected = np.broadcast_to(x, [*lead, *[m if n == 1 else n for n, m in zip(asked, x.shape, strict=True)]])
    assert_node_gives("Expand", [x, int64_array(*lead, *asked)], expected)
    repeats = [data.draw(st.integers(0, 3)) for _ in x.shape]
    assert_node_gives("Tile", [x, int64_array(*repeats)], np.tile(x, repeats))


@SETTINGS
@given(arrays, st.data())
def test_concat_undoes_split(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, x.shape[axis]), max_size=3)))
    parts = np.split(x, cuts, axis=axis)
    names = tuple(f"y{i}" for i in range(len(parts)))
    sizes = [part.shape[axis] for part in parts]
    for opset, inputs, attrs in (
        (18, [x, int64_array(*sizes)], {}),
        (13, [x, int64_array(*sizes)], {}),
        (11, [x], {"split": sizes}),
    ):
        for one, other in zip(
            run_node("Split", inputs, {"axis": axis, **attrs}, names, opset=opset), parts, strict=True
        ):
            np.testing.assert_array_equal(one, other)
    assert_node_gives("Concat", parts, x, {"axis": axis})


@pytest.mark.parametrize(("size", "parts", "sizes"), [(7, 3, [3, 3, 1]), (6, 3, [2, 2, 2]), (5, 4, [2, 2, 1, 0])])
def test_split_by_num_outputs(size, parts, sizes):
    x = np.arange(size, dtype=np.float32)
    names = tuple(f"y{i}" for i in range(parts))
    actual = run_node("Split", [x], {"num_outputs": parts}, names, opset=18)
    assert [part.size for part in actual] == sizes
    np.testing.assert_array_equal(np.concatenate(actual), x)


@SETTINGS
@given(arrays, st.sampled_from(["constant", "reflect", "edge", "wrap"]), st.data())
def test_pad_and_crop(x, mode, data):
    assume(x.size or mode == "constant")
    axes = data.draw(st.permutations(range(x.ndim)).flatmap(lambda p: st.integers(1, x.ndim).map(lambda n: p[:n])))
    widths = [data.draw(st.tuples(st.integers(-1, 3), st.integers(-1, 3))) for _ in axes]
    full = [(0, 0)] * x.ndim
    for axis, width in zip(axes, widths, strict=True):
        assume(x.shape[axis] + min(width[0], 0) + min(width[1], 0) >= (mode != "constant"))
        full[axis] = width
    crop = tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(x.shape, full, strict=True))
    more = {"constant_values": -1.5} if mode == "constant" else {}
    expected = np.pad(x[crop], [(max(low, 0), max(high, 0)) for low, high in full], mode=mode, **more)
    pads = int64_array(*(low for low, _ in widths), *(high for _, high in widths))
    assert_node_gives("Pad", [x, pads, np.float32(-1.5), int64_array(*axes)], expected, {"mode": mode})


@SETTINGS
@given(hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4), bounds, st.booleans())
def test_triangles(shape, k, upper):
    x = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    near = max(min(k, 10), -10)
    assert_node_gives(
        "Trilu", [x, np.array(k, np.int64)], (np.triu if upper else np.tril)(x, near), {"upper": int(upper)}
    )


def test_shape_and_size():
    x = np.zeros((2, 3, 4), np.float32)
    assert_node_gives("Shape", [x], int64_array(2, 3, 4))
    assert_node_gives("Shape", [x], int64_array(3), {"start": -2, "end": -1})
    assert_node_gives("Shape", [x], int64_array(), {"start": 3, "end": 1})
    assert_node_gives("Size", [x], np.array(24, np.int64))
    assert_node_gives("Shape", [np.float32(1)], int64_array())
