"""Every setting and argument of a context with values that are none: an error of the package before anything runs."""

import contextlib
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter import generation
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.generation.settings import SETTINGS


class NoEquality:
    def __eq__(self, other):
        raise RuntimeError("compares with nothing")


class NoRepr:
    def __repr__(self):
        raise RuntimeError("has no text")


class EndlessSequence(list):
    def __len__(self):
        return 10**12


VALUES = [
    *(True, False, "", "x", b"x", 1j, object(), int, len, {1, 2}, bytearray(b"x"), Exception("x")),
    *(-1, 0, 1, 0.5, 2**31 - 1, 2**31, 2**63, 10**400, 10**5000, -(10**400), 1e39, 1e308),
    *(float("nan"), float("inf"), -float("inf")),
    *([], [[]], [[[]]], [1], [1, 2], ["x"], [None], [True], [float("nan")], [-1], [2**31], [10**400], [[1, 10**400]]),
    *([[[1], 10**400]], [[[1], float("nan")]], [[[1], float("inf")]], (1, 10**400), (1, float("nan")), (10**400, 1.0)),
    *({}, {1: 2}, {(1,): 10**400}, {(10**400,): 1.0}, {"a": 1}),
    *(np.float32(1), np.float64("nan"), np.int64(-1), np.uint64(2**63), np.array(1), np.array([1, 2]), np.array([])),
    *(mx.array(1), mx.array([1, 2]), range(10**12), EndlessSequence([1]), NoEquality(), NoRepr()),
]
ARGUMENTS = [
    *("given", "embed", "image_token", "processors", "num_beams", "max_new_tokens", "prefill_step_size"),
    *("kv_bits", "kv_group_size", "assistant_model"),
]


def assert_checked(config, options):
    model = SimpleNamespace(generation_config=config)
    with contextlib.suppress(TransmuterError):
        hash(generation.context(model, **options).settings)  # values are of plain types


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_no_value_is_refused_or_harmless(name):
    for value in VALUES:
        for more in ({}, {"do_sample": True}, {"num_beams": 2}):
            assert_checked({}, {**more, name: value})
        assert_checked({name: value}, {})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_no_value_is_refused(name):
    for value in VALUES:
        assert_checked({}, {name: value})
