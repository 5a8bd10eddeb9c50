"""Exponentials in vector code, against numpy in float64."""

import re
from functools import partial
from io import StringIO
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.ops.functional import exponential
from mlx_transmuter.ops.functional.exponential import MIN_ELEMENTS, fast_exp, scaled_sigmoid, softmax_numerator_and_sum
from mlx_transmuter.ops.onnx.activation import gelu, swish


@pytest.fixture(params=["linux", "darwin"], autouse=True)
def platform(request):
    """Runs a test as on Linux, with the vector code, and as on macOS, with MLX's own."""
    with mock.patch.object(exponential.sys, "platform", request.param):
        yield request.param


@pytest.fixture(params=[True, False], ids=["compiled", "uncompiled"])
def compiled_or_not(request):
    """Runs a test with and without mx.compile."""
    if request.param:
        request.getfixturevalue("compiling")


@pytest.mark.usefixtures("compiled_or_not")
def test_fast_exp_is_accurate_to_about_one_unit_in_the_last_place(platform):
    if platform == "darwin":
        pytest.skip("MLX's own has another error")
    x = np.linspace(-86.9, 88.72, 2_000_003).astype(np.float32)
    # Where x / ln 2 is half-way between two integers, r is as far from 0 as it gets, on either side.
    half = (np.log(2) * (np.arange(-125, 128) + 0.5)).astype(np.float32)
    half = half[:, None] + np.arange(-4, 5, dtype=np.float32) * np.spacing(half)[:, None]
    x = np.concatenate([x, half.ravel()])
    wanted = np.exp(x.astype(np.float64))
    found = np.array(fast_exp(mx.array(x))).astype(np.float64)
    units = np.spacing(wanted.astype(np.float32)).astype(np.float64)
    # The last sum rounds by half a unit; what came before, r and its product, are smaller and round by less together.
    assert (np.abs(found - wanted) / units).max() <= 1.05
    assert np.array(fast_exp(mx.linspace(-120, -86.9, MIN_ELEMENTS))).max() < 2e-38


@pytest.mark.usefixtures("compiled_or_not")
def test_fast_exp_of_infinities_and_nan():
    x = np.zeros(MIN_ELEMENTS, np.float32)
    x[:9] = [-np.inf, np.inf, np.nan, -3.4e38, 3.4e38, 88.75, -104.0, -0.0, 1e-40]
    found = np.array(fast_exp(mx.array(x)))
    np.testing.assert_array_equal(found[:9], [0, np.inf, np.nan, 0, np.inf, np.inf, 0, 1, 1])
    assert (found[9:] == 1).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_and_short_arrays_use_mlx_exp(dtype):
    for x in (mx.linspace(-5, 5, 2 * MIN_ELEMENTS).astype(dtype), mx.linspace(-5, 5, MIN_ELEMENTS - 1)):
        assert fast_exp(x).dtype == x.dtype
        assert mx.array_equal(fast_exp(x), mx.exp(x))
        assert mx.array_equal(softmax_numerator_and_sum(x)[0], mx.softmax(x, precise=True))


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300) | st.sampled_from([256, 384, 1024]),  # of which many are reduced in two steps
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    hidden=st.floats(0, 1),
    compiles=st.booleans(),
    seed=st.integers(0, 99),
)
def test_softmax_numerator_over_sum_is_the_softmax(rows, columns, spread, hidden, compiles, seed):
    draw = np.random.default_rng(seed)
    x = (draw.normal(size=(rows, columns)) * spread).astype(np.float32)
    x[draw.random(x.shape) < hidden] = np.finfo(np.float32).min  # as attention hides columns; maybe all of a row
    exponentials = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    expected = exponentials / exponentials.sum(-1, keepdims=True)
    function = mx.compile(softmax_numerator_and_sum) if compiles else softmax_numerator_and_sum
    weights, sums = function(mx.array(x))
    weights = weights if sums is None else weights / sums
    np.testing.assert_allclose(np.array(weights), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(8, 300), (32, 1024)])
def test_hidden_columns_have_no_weight_and_nan_stays_in_its_row(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[:, ::3] = np.finfo(np.float32).min
    x[1, 1::3] = x[1, 2::3] = 1e38
    x[2, ::3] = -np.inf
    x[3, 5] = np.nan
    weights, sums = softmax_numerator_and_sum(mx.array(x))
    found = np.array(weights if sums is None else weights / sums)
    assert (np.delete(found, 3, axis=0)[:, ::3] == 0).all()
    assert np.isfinite(np.delete(found, 3, axis=0)).all()
    assert np.isnan(found[3]).all()


def test_softmax_gradients():
    draw = np.random.default_rng(0)
    for shape in (8, 300), (32, 1024):
        x, by = (mx.array(draw.normal(size=shape).astype(np.float32)) for _ in "xb")

        def actual(x, by=by):
            weights, sums = softmax_numerator_and_sum(x)
            return ((weights if sums is None else weights / sums) * by).sum()

        found, wanted = mx.grad(actual)(x), mx.grad(lambda x, by=by: (mx.softmax(x, axis=-1) * by).sum())(x)
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=1e-7)


def compiled_operation_names(function, *inputs) -> list[str]:
    """Returns the names of the operations of a compiled function."""
    mx.eval(inputs)
    out = mx.compile(function)(*inputs)
    text = StringIO()
    mx.export_to_dot(text, *(out if isinstance(out, tuple) else [out]))
    return re.findall(r'label ="([^"]+)", shape=rectangle', text.getvalue())


def test_a_compiled_softmax_is_six_operations(platform, compiling):
    if platform == "darwin":
        pytest.skip("MLX's own is one")
    names = compiled_operation_names(softmax_numerator_and_sum, mx.zeros((9, 300)))
    assert len(names) == 6
    assert [name for name in names if not name.startswith("Compiled")] == ["Max", "View float32", "Sum"]


@pytest.mark.parametrize(
    "consumer",
    [lambda y, x: y, lambda y, x: y * x, lambda y, x: y * x + 1, lambda y, x: (y * x + 1) / (x * x + 2) - y],
    ids=range(4),
)
def test_a_compiled_gate_is_seven_operations(platform, compiling, consumer):
    """No constant became an array, as those beyond the limit of a kernel do."""
    if platform == "darwin":
        pytest.skip("MLX's own is one")
    x = mx.zeros(MIN_ELEMENTS)
    names = compiled_operation_names(lambda x: consumer(swish(x), x), x)
    assert len(names) == 7
    assert [name for name in names if not name.startswith("Compiled")] == ["View float32", "ExpandDims", "Squeeze"]


@given(size=st.sampled_from([1, 7, MIN_ELEMENTS]), spread=st.sampled_from([1.0, 20.0, 1e3]), seed=st.integers(0, 99))
def test_scaled_sigmoid(size, spread, seed):
    draw = np.random.default_rng(seed)
    x, by = (draw.normal(size=size).astype(np.float32) for _ in "xb")
    x *= np.float32(spread)
    with np.errstate(over="ignore"):
        wanted = by / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(np.array(scaled_sigmoid(mx.array(x), mx.array(by))), wanted, rtol=1e-5, atol=1e-30)


def test_fast_exp_gradients():
    x = mx.linspace(-3, 3, MIN_ELEMENTS)
    for function in (fast_exp, mx.compile(fast_exp)):
        found = mx.grad(lambda x, function=function: (x * function(2 * x)).sum())(x)
        wanted = (1 + 2 * x) * mx.exp(2 * x)
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=1e-6)
        # Derived twice, a polynomial of the sixth degree is off by 1.7e-5.
        found = mx.grad(lambda x, function=function: mx.grad(lambda x: function(x).sum())(x).sum())(x)
        np.testing.assert_allclose(np.array(found), np.array(mx.exp(x)), rtol=2e-5)
        _, (found,) = mx.jvp(function, [x], [2 * mx.ones_like(x)])
        np.testing.assert_allclose(np.array(found), np.array(2 * mx.exp(x)), rtol=1e-5)


@pytest.mark.parametrize("size", [8, MIN_ELEMENTS])
@pytest.mark.parametrize(
    ("function", "wanted"),
    [(swish, nn.silu), (partial(gelu, approximate="tanh"), nn.gelu_approx)],
    ids=["swish", "gelu"],
)
def test_gate_gradients_are_finite_far_below_zero(size, function, wanted):
    """e⁻ˣ is infinite below -88, for gelu below -10."""
    x = mx.concatenate([mx.array([-1e30, -1e4, -200.0, -89.0, -20.0, -10.5, 100.0]), mx.linspace(-9, 9, size - 7)])
    if function is not swish:
        x = mx.maximum(x, -1e4)  # beyond, MLX's own overflows
    found, truth = (mx.grad(lambda x, f=f: f(x).sum())(x) for f in (function, wanted))
    np.testing.assert_allclose(np.array(found), np.array(truth), rtol=1e-5, atol=1e-6)


def test_functions_with_fast_exp_can_be_exported():
    mx.export_function(lambda part: None, lambda x: softmax_numerator_and_sum(swish(x))[0], mx.zeros((2, MIN_ELEMENTS)))
