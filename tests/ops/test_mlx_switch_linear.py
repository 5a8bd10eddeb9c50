"""Stacked experts, in floats and quantized, against a loop over tokens and choices in numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.ops import make_layer
from mlx_transmuter.ops.mlx.moe import MIN_SORTED_CHOICES, combine_expert_outputs, dispatch_to_experts
from mlx_transmuter.ops.mlx.switch_linear import QuantizedSwitchLinear, SwitchLinear, switch_linear

TOLERANCES = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 6e-2}


def random_switch_linear(
    experts: int, inputs: int, outputs: int, bias: bool, draw: np.random.Generator
) -> SwitchLinear:
    made = SwitchLinear(experts, inputs, outputs, bias)
    made.weight = mx.array(draw.normal(size=(experts, outputs, inputs)) / inputs**0.5, mx.float32)
    if bias:
        made.bias = mx.array(draw.normal(size=(experts, outputs)), mx.float32)
    return made


def run_mixture(x, indices, scores, up, down, pad: int = 0):
    rows, experts, order = dispatch_to_experts(x, indices)
    inner = mx.maximum(switch_linear(rows, up, experts, pad=pad), 0)
    return combine_expert_outputs(switch_linear(inner, down, experts), order, scores)


def dequantized_weight(layer: Any) -> np.ndarray:
    """Returns the weight of a layer in floats, dequantized by MLX if it is quantized."""
    weight = layer.weight
    if isinstance(layer, QuantizedSwitchLinear):
        weight = mx.dequantize(weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    return np.array(weight.astype(mx.float32), np.float64)


def reference_mixture(x, indices, scores, up, down) -> np.ndarray:
    """Returns Σ scores · down(relu(up(x))), token by token and choice by choice, in float64."""
    x, scores = (np.array(one.astype(mx.float32), np.float64) for one in (x, scores))
    x, scores, k = x.reshape(-1, x.shape[-1]), scores.reshape(-1, scores.shape[-1]), scores.shape[-1]
    weights = [
        (dequantized_weight(one), np.array(one.get("bias", mx.zeros(1)).astype(mx.float32))) for one in (up, down)
    ]
    expected = np.zeros((len(x), weights[1][0].shape[1]))
    for t, chosen in enumerate(np.array(indices).reshape(-1, k)):
        for score, e in zip(scores[t], chosen, strict=True):
            inner = x[t]
            for i, (weight, bias) in enumerate(weights):
                inner = weight[e][:, : len(inner)] @ inner + (bias[e] if bias.ndim > 1 else 0)
                inner = np.maximum(inner, 0) if i == 0 else inner
            expected[t] += score * inner
    return expected


@given(
    experts=st.integers(1, 9),
    k=st.integers(1, 5),
    lead=st.sampled_from([(1,), (3,), (0,), (2, 1), (1, 20), (5, 13), (2, 0)]),
    spread=st.booleans(),
    bias=st.booleans(),
    bits=st.sampled_from([None, 2, 3, 4, 6, 8]),
    kind=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=120)
def test_each_token_uses_its_experts(experts, k, lead, spread, bias, bits, kind, seed):
    """Few choices are by token, many are sorted; some experts have no tokens, and some are chosen twice."""
    draw = np.random.default_rng(seed)
    up, down = random_switch_linear(experts, 64, 32, bias, draw), random_switch_linear(experts, 32, 24, bias, draw)
    for one in (up, down):
        one.set_dtype(kind)
    if bits:
        up, down = (one.to_quantized(32, bits) for one in (up, down))
    x = mx.array(draw.normal(size=(*lead, 64))).astype(kind)
    indices = mx.array(draw.integers(0, experts if spread else 1, (*lead, k)), mx.int32)
    scores = mx.array(draw.integers(-2, 3, (*lead, k)) / 2).astype(kind)

    actual = run_mixture(x, indices, scores, up, down)
    expected = reference_mixture(x, indices, scores, up, down)
    assert (actual.shape, actual.dtype) == (expected.shape, kind)
    far = np.abs(np.array(actual.astype(mx.float32)) - expected).max(initial=0)
    assert far <= TOLERANCES[kind] * (1 + np.abs(expected).max(initial=0))


@pytest.mark.parametrize("tokens", [1, MIN_SORTED_CHOICES // 2 - 1, MIN_SORTED_CHOICES // 2, 200])
def test_many_choices_are_sorted_and_each_expert_is_read_once(tokens):
    draw = np.random.default_rng(tokens)
    indices = mx.array(draw.integers(0, 7, (tokens, 2)), mx.int32)
    rows, experts, order = dispatch_to_experts(mx.arange(tokens * 3).reshape(tokens, 3), indices)
    many = tokens * 2 >= MIN_SORTED_CHOICES
    assert (experts.ndim == 1, order.size > 0) == (many, many)
    flat = np.array(experts).reshape(-1)
    if many:
        assert (np.diff(flat) >= 0).all()
        np.testing.assert_array_equal(np.array(rows)[:, 0, 0] // 3, np.array(order) // 2)
    np.testing.assert_array_equal(np.sort(flat), np.sort(np.array(indices).reshape(-1)))


def test_an_incomplete_last_group_is_padded_with_zeros():
    draw = np.random.default_rng(0)
    up, down = (
        random_switch_linear(3, 64, 32, True, draw).to_quantized(32, 4),
        random_switch_linear(3, 32, 8, False, draw),
    )
    x = mx.array(draw.normal(size=(5, 40)), mx.float32)
    indices, scores = mx.array(draw.integers(0, 3, (5, 2)), mx.int32), mx.ones((5, 2))
    actual = run_mixture(x, indices, scores, up, down, pad=24)
    np.testing.assert_allclose(np.array(actual), reference_mixture(x, indices, scores, up, down), atol=1e-5)


def test_nn_quantize_quantizes_switch_layers():
    model = nn.Module()
    model.experts = random_switch_linear(3, 64, 32, True, np.random.default_rng(0))
    nn.quantize(model, group_size=32, bits=8)
    assert type(model.experts) is QuantizedSwitchLinear
    options = {"kind": "QuantizedSwitchLinear", "bias": True, "bits": 8, "group_size": 32}
    assert model.experts.parameters().keys() == make_layer(**options).parameters().keys()


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16], ids=str)
def test_only_the_chosen_experts_of_a_half_precision_stack_are_cast(kind, monkeypatch):
    """The CPU multiplies by stacks in float32 only."""
    seen = []
    made = mx.gather_mm
    monkeypatch.setattr(mx, "gather_mm", lambda x, w, **given: seen.append(w.shape[0]) or made(x, w, **given))
    stack = random_switch_linear(50, 8, 4, False, np.random.default_rng(0))
    stack.set_dtype(kind)
    rows, experts, _ = dispatch_to_experts(mx.ones((1, 8), kind), mx.array([[3, 41]]))
    assert stack(rows, experts).dtype == kind
    assert seen == [2] or mx.default_device() != mx.cpu
