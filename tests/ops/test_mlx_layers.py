"""Layers as operators, against MLX's own layers: numbers of rows, residuals, weights that are arguments."""

from __future__ import annotations

import io
import itertools
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_transmuter.ops.mlx.layers import as_linear, linear

SHAPES = [(6,), (1, 6), (5, 6), (1, 1, 6), (1, 5, 6), (3, 5, 6), (1, 2, 3, 6), (0, 4, 6), (1, 0, 6)]


def random_array(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).normal(size=shape), mx.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_the_layer(shape, bias):
    layer, x = nn.Linear(6, 4, bias=bias), random_array(*shape)
    actual, expected = np.array(linear(x, layer)), np.array(layer(x))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_linear_equals_the_layer(shape):
    table, x = nn.Embedding(9, 6), random_array(*shape)
    np.testing.assert_allclose(np.array(as_linear(x, table)), np.array(table.as_linear(x)), atol=1e-6)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (2, 32)])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 1, 64), (3, 1, 64), (1, 9, 64), (2, 5, 64), (0, 3, 64)], ids=str)
def test_quantized_products_equal_the_layer(shape, bits, group, kind):
    """Few rows are multiplied by the quantized weight, many, on the CPU, by the dequantized one."""
    x = random_array(*shape).astype(kind)
    full = nn.Linear(64, 40)
    full.set_dtype(kind)
    table = nn.Embedding(40, 64)
    table.set_dtype(kind)
    few, head = (
        nn.QuantizedLinear.from_linear(full, group, bits),
        nn.QuantizedEmbedding.from_embedding(table, group, bits),
    )
    near = {"rtol": 1e-5, "atol": 1e-5} if kind == mx.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for actual, expected in ((linear(x, few), few(x)), (as_linear(x, head), head.as_linear(x))):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(np.array(actual), np.array(expected), **near)


def rounding_bound(kind: mx.Dtype, terms: int) -> float:
    """Returns the largest error of a sum of so many terms in that type, relative to the sum of their magnitudes, in any
    order of the additions (Higham 2002, 4.2), each rounded to the nearest.
    """
    return terms * mx.finfo(kind).eps / 2


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_with_residual_agrees_with_numpy(shape, bias, kind):
    layer, x = nn.Linear(6, 4, bias=bias), random_array(*shape).astype(kind)
    layer.set_dtype(kind)
    to = (8 * random_array(*shape[:-1], 4, 1)[..., 0]).astype(kind)
    actual = linear(x, layer, to)
    assert (actual.shape, actual.dtype) == (to.shape, kind)
    x, to, weight, more = (
        np.array(one.astype(mx.float32)).astype(np.float64)
        for one in (x, to, layer.weight, layer.get("bias", mx.zeros(4)))
    )
    bound = rounding_bound(kind, 9) * (np.abs(x) @ np.abs(weight.T) + np.abs(more) + np.abs(to))
    assert (np.abs(np.array(actual.astype(mx.float32)) - (x @ weight.T + more + to)) <= bound).all()


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 1, 64), (3, 1, 64), (1, 9, 64), (2, 5, 64), (0, 3, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [mx.float32, mx.float16], ids=str)
def test_quantized_linear_with_residual_is_their_sum(shape, bias, kind):
    full = nn.Linear(64, 40, bias=bias)
    full.set_dtype(kind)
    layer, x, to = (
        nn.QuantizedLinear.from_linear(full, 32, 4),
        random_array(*shape).astype(kind),
        random_array(*shape[:-1], 40),
    )
    to = to.astype(kind)
    near = {"rtol": 1e-5, "atol": 1e-5} if kind == mx.float32 else {"rtol": 1e-2, "atol": 1e-2}
    actual, expected = linear(x, layer, to), layer(x) + to
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(np.array(actual), np.array(expected), **near)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kinds", list(itertools.permutations([mx.float32, mx.float16, mx.bfloat16], 2)), ids=str)
def test_a_residual_of_another_type_keeps_the_type_of_the_product(kinds, rows):
    """A residual in float32 does not make the product float32, and one in half precision does not round it."""
    kind, other = kinds
    layer, x, to = (
        nn.Linear(6, 4, bias=False),
        random_array(rows, 5, 6).astype(kind),
        random_array(rows, 5, 4).astype(other),
    )
    layer.set_dtype(kind)
    actual, expected = linear(x, layer, to), linear(x, layer) + to
    assert actual.dtype == expected.dtype == mx.float32
    assert mx.array_equal(actual, expected)


@pytest.mark.parametrize(("rows", "expected"), [(1, ["AddMM"]), (3, ["AddMM", "Flatten", "Flatten", "Unflatten"])])
@pytest.mark.parametrize("seq", [1, 5])
def test_linear_with_residual_is_one_operation(rows, expected, seq):
    """Views around it are free; a separate sum, or a matrix repeated for each row, would be another pass."""
    layer = nn.Linear(6, 4, bias=False)
    mx.eval(layer)
    step, text = mx.compile(lambda x, to: linear(x, layer, to)), io.StringIO()
    mx.export_to_dot(text, step(mx.zeros((rows, seq, 6)), mx.zeros((rows, seq, 4))))
    made = re.findall(r'label ?= ?"([A-Z]\w*)"', text.getvalue())
    assert sorted(one for one in made if one not in ("Broadcast", "Full", "AsType")) == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_linear_with_residual_has_gradients(rows):
    layer, x, to = nn.Linear(6, 4, bias=False), random_array(rows, 5, 6), random_array(rows, 5, 4, 1)[..., 0]

    def loss(weight, x, to, sum_):
        layer.weight = weight
        return mx.sin(sum_(x, to)).sum()

    def own(x, to):
        return linear(x, layer, to)

    weight = layer.weight
    actual = mx.grad(lambda *given: loss(*given, own), argnums=(0, 1, 2))(weight, x, to)
    expected = mx.grad(lambda *given: loss(*given, lambda x, to: layer(x) + to), argnums=(0, 1, 2))(weight, x, to)
    for one, other in zip(actual, expected, strict=True):
        assert mx.abs(other).max() > 0.1
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-5, atol=1e-5)


def test_weights_may_be_arguments_as_in_training():
    layer, x = nn.Linear(6, 4), random_array(1, 3, 6)
    actual = nn.value_and_grad(layer, lambda x: linear(x, layer).square().sum())(x)
    expected = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(np.array(actual[1][name]), np.array(expected[1][name]), rtol=1e-5, atol=1e-5)


def test_a_replaced_layer_is_called():
    class Doubled(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    layer, x = Doubled(6, 4), random_array(1, 3, 6)
    assert np.array_equal(np.array(linear(x, layer)), np.array(layer(x)))
    to = random_array(1, 3, 4)
    assert np.array_equal(np.array(linear(x, layer, to)), np.array(layer(x) + to))
