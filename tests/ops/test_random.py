"""Dropout and random arrays: distributions, seeds, inference."""

import mlx.core as mx
import numpy as np
import pytest
from numpy_node import operator_function, run_node


@pytest.mark.parametrize("opset", [11, 12, 22])
def test_dropout_in_inference_is_the_identity(opset):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, mask = run_node("Dropout", [x], {} if opset > 11 else {"ratio": 0.9}, ("y", "mask"), opset=opset)
    np.testing.assert_array_equal(y, x)
    assert mask.all()


def test_dropout_in_training_keeps_the_mean():
    dropout = operator_function("Dropout")
    y, kept = dropout(mx.ones(20000), np.float32(0.25), np.array(True), seed=7, outputs=2)
    assert set(np.unique(np.array(y)).round(5)) == {0, np.float32(4 / 3).round(5)}
    np.testing.assert_array_equal(np.array(y) > 0, np.array(kept))
    assert np.array(y).mean() == pytest.approx(1, abs=0.02)
    assert not np.array(dropout(mx.ones(8), np.float32(1), np.array(True), seed=7)[0]).any()


def test_the_same_seed_draws_the_same_numbers_and_another_others():
    for kind in ("RandomNormal", "RandomUniform"):
        draw = operator_function(kind)
        one, again, other = (np.array(draw(shape=[5], seed=seed)) for seed in (3.5, 3.5, 3.25))
        np.testing.assert_array_equal(one, again)
        assert (one != other).all()


def test_distributions():
    normal = np.array(operator_function("RandomNormal")(shape=[20000], mean=2.0, scale=3.0, seed=1.0))
    assert normal.mean() == pytest.approx(2, abs=0.1)
    assert normal.std() == pytest.approx(3, abs=0.1)
    uniform = np.array(
        operator_function("RandomUniformLike")(mx.zeros((100, 200), mx.float16), low=-1.0, high=3.0, seed=1.0)
    )
    assert uniform.dtype == np.float16
    assert (uniform.min(), uniform.max()) == (pytest.approx(-1, abs=0.01), pytest.approx(3, abs=0.01))
    assert uniform.astype(np.float32).mean() == pytest.approx(1, abs=0.05)
    drawn = np.array(operator_function("Bernoulli")(mx.array([[0.0], [0.3], [1.0]]) * mx.ones((3, 20000)), seed=1.0))
    assert drawn.mean(axis=1).tolist() == [0, pytest.approx(0.3, abs=0.02), 1]
    classes = np.array(
        operator_function("Multinomial")(mx.log(mx.array([[0.2, 0.0, 0.8]])), sample_size=20000, seed=1.0)
    )
    assert classes.shape == (1, 20000)
    assert [(classes == c).mean() for c in range(3)] == [pytest.approx(0.2, abs=0.02), 0, pytest.approx(0.8, abs=0.02)]


def test_requested_types():
    assert operator_function("RandomNormalLike")(mx.zeros(3), dtype=10).dtype == mx.float16
    assert operator_function("Bernoulli")(mx.zeros(3), dtype=9).dtype == mx.bool_
    assert operator_function("Multinomial")(mx.zeros((1, 2)), dtype=7).dtype == mx.int32
