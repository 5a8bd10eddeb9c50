"""Exponentials in vector code, against numpy in float64."""

from functools import partial
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.ops import exponential
from mlx_transmuter.ops.activation import gelu, swish
from mlx_transmuter.ops.exponential import FEWEST, exp, sigmoid_times, softmax_parts


@pytest.fixture(params=["linux", "darwin"], autouse=True)
def platform(request):
    """Both forms, whatever the machine."""
    with mock.patch.object(exponential.sys, "platform", request.param):
        yield request.param


def test_an_exponential_is_within_one_and_a_half_units_in_the_last_place(platform, compiling):
    if platform == "darwin":
        pytest.skip("MLX's own has another error")
    x = np.linspace(-86.9, 88.72, 2_000_003).astype(np.float32)
    wanted = np.exp(x.astype(np.float64))
    found = np.array(exp(mx.array(x))).astype(np.float64)
    units = np.spacing(wanted.astype(np.float32)).astype(np.float64)
    # The last sum and the last product but one round by half a unit each, and what came before by less than that.
    assert (np.abs(found - wanted) / units).max() <= 1.5
    assert np.array(exp(mx.linspace(-120, -86.9, FEWEST))).max() < 2e-38


def test_an_exponential_has_the_ends_of_the_real_line(compiling):
    x = np.zeros(FEWEST, np.float32)
    x[:9] = [-np.inf, np.inf, np.nan, -3.4e38, 3.4e38, 88.75, -104.0, -0.0, 1e-40]
    found = np.array(exp(mx.array(x)))
    np.testing.assert_array_equal(found[:9], [0, np.inf, np.nan, 0, np.inf, np.inf, 0, 1, 1])
    assert (found[9:] == 1).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_and_short_arrays_keep_mlx_s_own(dtype):
    for x in (mx.linspace(-5, 5, 2 * FEWEST).astype(dtype), mx.linspace(-5, 5, FEWEST - 1)):
        assert exp(x).dtype == x.dtype
        assert mx.array_equal(exp(x), mx.exp(x))
        assert mx.array_equal(softmax_parts(x)[0], mx.softmax(x, precise=True))


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    hidden=st.floats(0, 1),
    compiled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_of_a_softmax_are_the_softmax(rows, columns, spread, hidden, compiled, seed):
    draw = np.random.default_rng(seed)
    x = (draw.normal(size=(rows, columns)) * spread).astype(np.float32)
    x[draw.random(x.shape) < hidden] = np.finfo(np.float32).min  # as attention hides columns; maybe all of a row
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True)
    found, sums = (mx.compile(softmax_parts) if compiled else softmax_parts)(mx.array(x))
    found = found if sums is None else found / sums
    np.testing.assert_allclose(np.array(found), wanted, rtol=1e-5, atol=1e-7)


@given(size=st.sampled_from([1, 7, FEWEST]), spread=st.sampled_from([1.0, 20.0, 1e3]), seed=st.integers(0, 99))
def test_a_gate_is_the_logistic_function_times_a_factor(size, spread, seed):
    draw = np.random.default_rng(seed)
    x, by = (draw.normal(size=size).astype(np.float32) for _ in "xb")
    x *= np.float32(spread)
    with np.errstate(over="ignore"):
        wanted = by / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(np.array(sigmoid_times(mx.array(x), mx.array(by))), wanted, rtol=1e-5, atol=1e-30)


def test_gradients_go_through_an_exponential():
    x = mx.linspace(-3, 3, FEWEST)
    for function in (exp, mx.compile(exp)):
        found = mx.grad(lambda x, function=function: (x * function(2 * x)).sum())(x)
        wanted = (1 + 2 * x) * mx.exp(2 * x)
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [8, FEWEST])
@pytest.mark.parametrize(
    ("function", "wanted"),
    [(swish, nn.silu), (partial(gelu, approximate="tanh"), nn.gelu_approx)],
    ids=["swish", "gelu"],
)
def test_gradients_of_a_gate_are_numbers_far_below_zero(size, function, wanted):
    """As MLX's own: e⁻ˣ is infinite below -88, for gelu below -10."""
    x = mx.concatenate([mx.array([-1e30, -1e4, -200.0, -89.0, -20.0, -10.5, 100.0]), mx.linspace(-9, 9, size - 7)])
    if function is not swish:
        x = mx.maximum(x, -1e4)  # beyond, MLX's own overflows
    found, truth = (mx.grad(lambda x, f=f: f(x).sum())(x) for f in (function, wanted))
    np.testing.assert_allclose(np.array(found), np.array(truth), rtol=1e-5, atol=1e-6)
