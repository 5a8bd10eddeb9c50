"""Layers as operators: the products of MLX's own layers, whatever the rows, and also where the weights are arguments."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_transmuter.ops.layers import as_linear, linear

SHAPES = [(6,), (1, 6), (5, 6), (1, 1, 6), (1, 5, 6), (3, 5, 6), (1, 2, 3, 6), (0, 4, 6), (1, 0, 6)]


def drawn(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).normal(size=shape), mx.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_layer(shape, bias):
    layer, x = nn.Linear(6, 4, bias=bias), drawn(*shape)
    found, wanted = np.array(linear(x, layer)), np.array(layer(x))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_head_that_is_the_table_is_that_of_the_layer(shape):
    table, x = nn.Embedding(9, 6), drawn(*shape)
    np.testing.assert_allclose(np.array(as_linear(x, table)), np.array(table.as_linear(x)), atol=1e-6)


@pytest.mark.parametrize("kind", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (2, 32)])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 1, 64), (3, 1, 64), (1, 9, 64), (2, 5, 64), (0, 3, 64)], ids=str)
def test_a_quantised_product_is_that_of_the_layer(shape, bits, group, kind):
    """Few rows are multiplied by the blocks, many, on the CPU, by the floats that they stand for."""
    x = drawn(*shape).astype(kind)
    full = nn.Linear(64, 40)
    full.set_dtype(kind)
    table = nn.Embedding(40, 64)
    table.set_dtype(kind)
    few, head = (
        nn.QuantizedLinear.from_linear(full, group, bits),
        nn.QuantizedEmbedding.from_embedding(table, group, bits),
    )
    near = {"rtol": 1e-5, "atol": 1e-5} if kind == mx.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for found, wanted in ((linear(x, few), few(x)), (as_linear(x, head), head.as_linear(x))):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(np.array(found), np.array(wanted), **near)


def test_weights_may_be_arguments_as_in_training():
    layer, x = nn.Linear(6, 4), drawn(1, 3, 6)
    found = nn.value_and_grad(layer, lambda x: linear(x, layer).square().sum())(x)
    wanted = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(x)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(np.array(found[1][name]), np.array(wanted[1][name]), rtol=1e-5, atol=1e-5)


def test_a_layer_that_took_the_place_of_another_is_called():
    class Doubled(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    layer, x = Doubled(6, 4), drawn(1, 3, 6)
    assert np.array_equal(np.array(linear(x, layer)), np.array(layer(x)))
