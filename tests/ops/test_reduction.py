"""Reductions against NumPy: no axes, empty axes, empty arrays, keepdims, integers, half precision, versions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy_node import assert_node_gives

SETTINGS = settings(max_examples=60, derandomize=True)

# kind -> (NumPy's function of a float64 array, what it makes of nothing, the opset from which axes are an input)
REDUCTIONS = {
    "ReduceSum": (np.sum, 0, 13),
    "ReduceMean": (np.mean, np.nan, 18),
    "ReduceMax": (np.max, -np.inf, 18),
    "ReduceMin": (np.min, np.inf, 18),
    "ReduceProd": (np.prod, 1, 18),
    "ReduceL1": (lambda x, **to: np.sum(np.abs(x), **to), 0, 18),
    "ReduceL2": (lambda x, **to: np.sqrt(np.sum(x * x, **to)), 0, 18),
    "ReduceSumSquare": (lambda x, **to: np.sum(x * x, **to), 0, 18),
    "ReduceLogSum": (lambda x, **to: np.log(np.sum(x, **to)), -np.inf, 18),
    "ReduceLogSumExp": (lambda x, **to: np.log(np.sum(np.exp(x), **to)), -np.inf, 18),
}


def numpy_reduction(function, empty, x, axes, keepdims):
    wide = x.astype(np.float64)
    if all(x.shape[axis] for axis in axes):
        return np.asarray(function(wide, axis=axes, keepdims=keepdims)).astype(x.dtype)
    shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes]
    return np.full(shape, empty, x.dtype)


@pytest.mark.parametrize("kind", REDUCTIONS)
@SETTINGS
@given(shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), data=st.data())
def test_axes(kind, shape, data):
    function, empty, since = REDUCTIONS[kind]
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    x = (rng.random(shape) + 0.5).astype(data.draw(st.sampled_from([np.float32, np.float16])))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in axes]
    keepdims = data.draw(st.booleans())
    expected = numpy_reduction(function, empty, x, axes, keepdims)
    tolerance = 1e-5 if x.dtype == np.float32 else 4e-3
    assert_node_gives(
        kind, [x, np.array(signed, np.int64)], expected, {"keepdims": int(keepdims)}, opset=since, tolerance=tolerance
    )
    assert_node_gives(
        kind, [x], expected, {"axes": signed, "keepdims": int(keepdims)}, opset=since - 1, tolerance=tolerance
    )


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_empty_axes_mean_all_axes_or_none(kind):
    function, empty, since = REDUCTIONS[kind]
    x = (np.random.default_rng(1).random((2, 3)) + 0.5).astype(np.float32)
    for axes in (None, np.array([], np.int64)):
        for keepdims in (False, True):
            attrs = {"keepdims": int(keepdims)}
            whole = numpy_reduction(function, empty, x, (0, 1), keepdims)
            assert_node_gives(kind, [x, axes], whole, attrs, opset=since, tolerance=1e-6)
            # Over no axes each element is its own sum: |x| of L2, log of LogSum, x itself of the mean.
            each = np.asarray(function(x.astype(np.float64)[..., None], axis=-1)).astype(np.float32)
            assert_node_gives(kind, [x, axes], each, {**attrs, "noop_with_empty_axes": 1}, opset=since, tolerance=1e-6)


def test_scalars_and_integers():
    assert_node_gives("ReduceSum", [np.float32(3)], np.float32(3))
    x = np.array([[100, 100], [-3, 50]], np.int32)
    assert_node_gives("ReduceSum", [x, np.array([0])], x.sum(axis=0, keepdims=True).astype(np.int32))
    assert_node_gives("ReduceProd", [x], np.prod(x, keepdims=True).astype(np.int32))
    assert_node_gives("ReduceMax", [x.astype(np.int8), np.array([1])], x.max(axis=1, keepdims=True).astype(np.int8))
    assert_node_gives("ReduceMax", [np.zeros((2, 0), np.int8), np.array([1])], np.full((2, 1), -128, np.int8), opset=20)
    assert_node_gives("ReduceMin", [np.array([[True, False]]), np.array([1])], np.array([[False]]), opset=20)
