"""Arrays from shapes and numbers, and comparisons, against NumPy."""

import numpy as np
import pytest
from numpy_node import assert_node_gives, operator_function, run_node


@pytest.mark.parametrize(
    ("dtype", "start", "limit", "delta"),
    [
        (np.int64, 3, 9, 3),
        (np.int64, 10, 4, -2),
        (np.int64, 0, 0, 1),
        (np.int64, 5, 1, 1),
        (np.int64, 0, 7, 2),
        (np.float32, 0.0, 1.0, 0.3),
        (np.float32, 1.0, -1.0, -0.5),
        (np.float32, 0.0, 1.0, 0.25),
    ],
)
def test_ranges(dtype, start, limit, delta):
    expected = np.arange(start, limit, delta)
    held = np.int32 if dtype == np.int64 else dtype
    assert_node_gives(
        "Range", [np.array(v, dtype) for v in (start, limit, delta)], expected.astype(held), tolerance=1e-6
    )


def test_a_range_of_halves_is_computed_in_single():
    values = [np.array(v, np.float16) for v in (2048, 2056, 1)]
    assert_node_gives("Range", values, np.arange(2048, 2056, dtype=np.float32).astype(np.float16), opset=27)


def test_constant_of_shape():
    for value in (np.array([7], np.int64), np.array([True]), np.array([-1.5], np.float16)):
        expected = np.full((2, 3), value[0])
        assert_node_gives("ConstantOfShape", [np.array([2, 3])], expected, {"value": value})
    assert_node_gives("ConstantOfShape", [np.array([], np.int64)], np.float32(0))
    assert_node_gives("ConstantOfShape", [np.array([2, 0])], np.zeros((2, 0), np.float32))


def test_constants_stay_on_the_host():
    constant = operator_function("Constant")
    assert constant(value_int=-(2**40)).item() == -(2**40)
    assert constant(value_floats=[1.0, 2.0]).dtype == np.float32
    assert constant(value=np.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_one_hot(axis):
    indices = np.array([[0, -1, 5], [-4, 3, 1]], np.int64)
    expected = np.full((2, 3, 4), 2.0, np.float32)
    for at in np.ndindex(2, 3):
        if -4 <= indices[at] < 4:
            expected[(*at, indices[at] % 4)] = 5
    expected = np.moveaxis(expected, -1, axis)
    assert_node_gives("OneHot", [indices, np.array(4), np.array([2, 5], np.float32)], expected, {"axis": axis})


@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_eye_like(k):
    x = np.zeros((2, 4), np.int32)
    assert_node_gives("EyeLike", [x], np.eye(2, 4, k=k, dtype=np.int32), {"k": k})
    assert_node_gives("EyeLike", [x], np.eye(2, 4, k=k, dtype=np.float32), {"k": k, "dtype": 1})


def test_is_inf_by_sign():
    x = np.array([-np.inf, -1, 0, np.inf, np.nan], np.float32)
    for negative in (0, 1):
        for positive in (0, 1):
            expected = (np.isneginf(x) & bool(negative)) | (np.isposinf(x) & bool(positive))
            assert_node_gives("IsInf", [x], expected, {"detect_negative": negative, "detect_positive": positive})
    assert_node_gives("IsNaN", [x], np.isnan(x))


def test_comparisons_of_nan_and_bools():
    a, b = np.array([1, 2, np.nan], np.float32), np.array([1, 1, np.nan], np.float32)
    for kind, compare in (
        ("Equal", np.equal), ("Greater", np.greater), ("GreaterOrEqual", np.greater_equal),
        ("Less", np.less), ("LessOrEqual", np.less_equal),
    ):  # fmt: skip
        assert_node_gives(kind, [a, b], compare(a, b))
    p, q = np.array([True, True, False, False]), np.array([True, False, True, False])
    for kind, both in (("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.logical_xor), ("Equal", np.equal)):
        assert_node_gives(kind, [p, q], both(p, q))
    assert_node_gives("Not", [p], ~p)


def test_where_broadcasts_and_keeps_the_type():
    condition = np.array([[True], [False]])
    a, b = np.arange(3, dtype=np.int32), np.array(-1, np.int32)
    assert_node_gives("Where", [condition, a, b], np.where(condition, a, b))
    assert_node_gives(
        "Where", [condition, np.float16(1), np.float16(np.nan)], np.where(condition, np.float16(1), np.float16(np.nan))
    )


def test_int64_on_the_host_keeps_64_bits():
    assert run_node("Identity", [np.array([2**31 - 1, -(2**31)], np.int64)])[0].tolist() == [2**31 - 1, -(2**31)]
