"""Arithmetic against Python's integers and NumPy's floats: signs, extremes, NaN, broadcasting."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy_node import assert_node_gives

SETTINGS = settings(max_examples=60, derandomize=True)
INT32 = np.iinfo(np.int32)

shapes = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3, min_side=0, max_side=3)
integers = st.sampled_from([INT32.min, INT32.min + 1, -7, -3, -2, -1, 0, 1, 2, 3, 7, 100, INT32.max - 1, INT32.max])


def wrap_int32(value: int) -> int:
    """Returns the integer wrapped to 32 bits."""
    return (value - INT32.min) % 2**32 + INT32.min


def broadcastable_pairs(draw_from):
    return shapes.flatmap(
        lambda s: st.tuples(*(hnp.arrays(np.int32, shape, elements=draw_from) for shape in s.input_shapes))
    )


@SETTINGS
@given(broadcastable_pairs(integers))
def test_integers_divide_toward_zero(arrays):
    a, b = arrays[0], np.where(arrays[1] == 0, 1, arrays[1])
    quotient = np.vectorize(
        lambda x, y: wrap_int32(int(abs(int(x)) // abs(int(y))) * (1 if (x < 0) == (y < 0) else -1))
    )
    expected = (
        np.array(quotient(a, b), np.int32) if np.broadcast(a, b).size else np.zeros(np.broadcast(a, b).shape, np.int32)
    )
    assert_node_gives("Div", [a, b], expected)


@SETTINGS
@given(broadcastable_pairs(integers), st.booleans())
def test_the_sign_of_integer_remainders_follows_fmod(arrays, fmod):
    a, b = arrays[0], np.where(arrays[1] == 0, 1, arrays[1])
    # Python's % has the divisor's sign, math.fmod the dividend's; both are exact for 32-bit integers.
    rest = np.vectorize(lambda x, y: int(math.fmod(int(x), int(y))) if fmod else int(x) % int(y))
    size = np.broadcast(a, b)
    expected = np.array(rest(a, b), np.int32) if size.size else np.zeros(size.shape, np.int32)
    assert_node_gives("Mod", [a, b], expected, {"fmod": int(fmod)})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_narrow_integers_divide_like_wide_ones(dtype):
    limits = np.iinfo(dtype)
    values = sorted({limits.min, limits.max, 1, 2, 3, 7, 100, *((-1, -2, -3, -7, -100) if limits.min else ())})
    a = np.array(values, dtype)[:, None]
    b = np.array(values if 0 not in values else values[1:], dtype)[None, :]
    exact = [[(int(x), int(y)) for y in b[0]] for x in a[:, 0]]
    quotients = [[abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in row] for row in exact]
    assert_node_gives("Div", [a, b], np.array(quotients).astype(dtype))
    assert_node_gives("Mod", [a, b], np.array([[x % y for x, y in row] for row in exact]).astype(dtype))
    assert_node_gives(
        "Mod", [a, b], np.array([[int(math.fmod(x, y)) for x, y in row] for row in exact]).astype(dtype), {"fmod": 1}
    )


SPECIAL_FLOATS = np.array([-np.inf, -7.5, -2.0, -0.5, 0.5, 2.0, 7.5, np.inf, np.nan], np.float32)


def test_float_remainders():
    a, b = SPECIAL_FLOATS[:, None], SPECIAL_FLOATS[None, :]
    with np.errstate(invalid="ignore"):
        assert_node_gives("Mod", [a, b], np.fmod(a, b), {"fmod": 1}, tolerance=1e-6)
        assert_node_gives("Mod", [a, b], np.mod(a, b), opset=28, tolerance=1e-6)


def test_extrema_propagate_nan_and_clip_prefers_the_upper_bound():
    a, b = SPECIAL_FLOATS[:, None], SPECIAL_FLOATS[None, :]
    assert_node_gives("Max", [a, b], np.maximum(a, b))
    assert_node_gives("Min", [a, b], np.minimum(a, b))
    assert_node_gives(
        "Clip", [SPECIAL_FLOATS, np.float32(1), np.float32(-1)], np.minimum(np.maximum(SPECIAL_FLOATS, 1), -1)
    )
    assert_node_gives("Clip", [SPECIAL_FLOATS, None, np.float32(0.25)], np.minimum(SPECIAL_FLOATS, np.float32(0.25)))
    assert_node_gives("Clip", [np.array([-3, 5], np.int32), np.int32(0)], np.array([0, 5], np.int32))


def test_sums_of_several_inputs():
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=shape).astype(np.float32) for shape in ((2, 1, 3), (4, 1), (), (3,))]
    assert_node_gives("Sum", xs, sum(xs), tolerance=1e-6)
    assert_node_gives("Mean", xs, sum(xs) / np.float32(4), tolerance=1e-6)
    assert_node_gives("Max", xs[:1], xs[0])


@pytest.mark.parametrize(
    ("base", "exponent"),
    [
        (np.array([-3, -1, 0, 1, 2], np.int32), np.array([3, 2, 5, 4, 30], np.int32)),
        (np.array([-1.5, 0.0, 4.0], np.float32), np.array([2, 0, -1], np.int32)),
        (np.array([4, 9], np.int32), np.array([0.5, 0.5], np.float32)),
        (np.array([2.0, 3.0], np.float16), np.array([3.0, 2.0], np.float32)),
    ],
)
def test_powers_have_the_type_of_the_base(base, exponent):
    assert_node_gives(
        "Pow", [base, exponent], np.power(base.astype(np.float64), exponent).astype(base.dtype), tolerance=1e-3
    )


def test_rounding_and_signs():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.49, np.nan, np.inf], np.float32)
    assert_node_gives("Round", [x], np.rint(x))
    assert_node_gives("Floor", [x], np.floor(x))
    assert_node_gives("Ceil", [x], np.ceil(x))
    assert_node_gives("Sign", [x], np.sign(x))
    assert_node_gives("Sign", [np.array([-5, 0, 7], np.int32)], np.array([-1, 0, 1], np.int32))


@SETTINGS
@given(
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.int8, np.int32]), st.sampled_from(["LEFT", "RIGHT"]), st.data()
)
def test_shifts(dtype, direction, data):
    limits = np.iinfo(dtype)
    x = data.draw(hnp.arrays(dtype, 4, elements=st.integers(limits.min, limits.max)))
    by = data.draw(hnp.arrays(dtype, 4, elements=st.integers(max(limits.min, -2), 40)))

    def shifted(value: int, count: int) -> int:
        if not 0 <= count < limits.bits:
            return -1 if direction == "RIGHT" and value < 0 else 0
        return value >> count if direction == "RIGHT" else (value << count) % 2**limits.bits

    exact = [shifted(int(v), int(c)) for v, c in zip(x, by, strict=True)]
    expected = (
        np.array([value % 2**limits.bits for value in exact], np.uint64).astype(np.dtype(f"u{x.itemsize}")).view(dtype)
    )
    assert_node_gives("BitShift", [x, by], expected, {"direction": direction}, opset=28)


def test_bits():
    a, b = np.array([0b1100, 255], np.uint8), np.array([0b1010, 1], np.uint8)
    assert_node_gives("BitwiseAnd", [a, b], a & b)
    assert_node_gives("BitwiseOr", [a, b], a | b)
    assert_node_gives("BitwiseXor", [a, b], a ^ b)
    assert_node_gives("BitwiseNot", [a], ~a)
