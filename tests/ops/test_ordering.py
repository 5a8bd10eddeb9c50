"""Ordering against NumPy: ties by index, last indices, cumulative sums, indices of elements."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy_node import assert_node_gives, run_node

SETTINGS = settings(max_examples=60, derandomize=True)
# Few different values, so that there are ties; the smallest integer has no negative.
arrays = hnp.arrays(
    np.int32,
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5),
    elements=st.sampled_from([np.iinfo(np.int32).min, -1, 0, 2, np.iinfo(np.int32).max]),
)
kinds = st.sampled_from([np.int32, np.float32, np.uint8, np.float16])


@SETTINGS
@given(arrays, kinds, st.booleans(), st.data())
def test_top_k(x, kind, largest, data):
    with np.errstate(over="ignore"):
        x = x.astype(kind)
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    k = data.draw(st.integers(0, x.shape[axis]))
    rank = x.astype(np.float64) * (-1 if largest else 1)
    order = np.take(np.argsort(rank, axis=axis, kind="stable"), np.arange(k), axis=axis)
    inputs = [x, np.array([k], np.int64)]
    values, indices = run_node("TopK", inputs, {"axis": axis, "largest": int(largest)}, ("values", "indices"))
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=axis))


@pytest.mark.parametrize(("kind", "find"), [("ArgMax", np.argmax), ("ArgMin", np.argmin)])
@SETTINGS
@given(x=arrays, last=st.booleans(), keepdims=st.booleans(), data=st.data())
def test_arg(kind, find, x, last, keepdims, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    expected = x.shape[axis] - 1 - find(np.flip(x, axis), axis=axis) if last else find(x, axis=axis)
    expected = np.expand_dims(expected, axis) if keepdims else expected
    attrs = {"axis": axis, "keepdims": int(keepdims), "select_last_index": int(last)}
    assert_node_gives(kind, [x], np.asarray(expected, np.int64), attrs)


@SETTINGS
@given(arrays, st.booleans(), st.booleans(), st.data())
def test_cumulative_sums_and_products(x, exclusive, backward, data):
    x = (x % 5).astype(np.float32)
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    attrs = {"exclusive": int(exclusive), "reverse": int(backward)}
    for kind, run_over, unit in (("CumSum", np.cumsum, 0), ("CumProd", np.cumprod, 1)):
        turned = np.flip(x, axis) if backward else x
        if exclusive:
            first = np.full_like(np.take(turned, [0], axis=axis), unit)
            turned = np.concatenate([first, np.delete(turned, -1, axis=axis)], axis=axis)
        expected = run_over(turned, axis=axis)
        expected = np.flip(expected, axis) if backward else expected
        assert_node_gives(
            kind, [x, np.array(axis, np.int64)], expected.astype(np.float32), attrs, opset=26, tolerance=1e-6
        )


def test_non_zero():
    x = np.array([[0, 2, 0], [3, 0, 4]], np.float32)
    assert_node_gives("NonZero", [x], np.array(np.nonzero(x), np.int64))
    assert_node_gives("NonZero", [np.zeros((2, 0), np.float32)], np.zeros((2, 0), np.int64))


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_unique_in_order_of_appearance(axis):
    x = np.array([[3, 1, 3], [1, 1, 1], [3, 1, 3]], np.int32)
    attrs = {"sorted": 0} | ({} if axis is None else {"axis": axis})
    names = ("y", "first", "inverse", "counts")
    y, first, inverse, counts = run_node("Unique", [x], attrs, names)
    parts = x.reshape(-1) if axis is None else np.moveaxis(x, axis, 0)
    seen: list = []
    for part in parts.tolist():
        if part not in seen:
            seen.append(part)
    assert (y if axis is None else np.moveaxis(y, axis, 0)).tolist() == seen
    assert first.tolist() == [parts.tolist().index(part) for part in seen]
    assert inverse.tolist() == [seen.index(part) for part in parts.tolist()]
    assert counts.tolist() == [parts.tolist().count(part) for part in seen]
