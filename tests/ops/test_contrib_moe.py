"""MoE and QMoE against onnxruntime."""

from functools import partial

import numpy as np
import pytest
import random_inputs
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import pack_bits

floats = partial(random_inputs.floats, spread=0.3)

EXPERTS, HIDDEN, INNER = 5, 64, 32


def dense_weights(fused, bias=True, dtype=np.float32):
    """Returns fc1, its bias, fc2, its bias."""
    inner = 2 * INNER if fused else INNER
    parts = [
        floats(3, EXPERTS, inner, HIDDEN),
        floats(4, EXPERTS, inner),
        floats(5, EXPERTS, HIDDEN, INNER),
        floats(6, EXPERTS, HIDDEN),
    ]
    return [part.astype(dtype) if bias or i % 2 == 0 else None for i, part in enumerate(parts)]


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu"])
@pytest.mark.parametrize(("k", "normalize"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("shape", [(2, 3, HIDDEN), (7, HIDDEN)])
def test_moe(shape, k, normalize, activation):
    fused = activation == "swiglu"
    x, router = floats(1, *shape, spread=1), floats(2, int(np.prod(shape[:-1])), EXPERTS, spread=2)
    attrs = {"k": k, "normalize_routing_weights": normalize, "activation_type": activation}
    attrs |= {"swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 1.5} if fused else {}
    assert_matches_onnxruntime("MoE", [x, router, *dense_weights(fused)], attrs, tolerance=3e-6)
    assert_matches_onnxruntime("MoE", [x, router, *dense_weights(fused, bias=False)], attrs, tolerance=3e-6)


def test_moe_in_float16():
    inputs = [floats(1, 7, HIDDEN, dtype=np.float16, spread=1), floats(2, 7, EXPERTS, dtype=np.float16)]
    assert_matches_onnxruntime("MoE", [*inputs, *dense_weights(False, dtype=np.float16)], {"k": 2}, tolerance=3e-3)


@pytest.mark.parametrize("block", [16, 32])
def test_q_moe_in_float16(block):
    x, router = floats(1, 7, HIDDEN, dtype=np.float16, spread=1), floats(2, 7, EXPERTS, dtype=np.float16)
    (w1, s1, _), (w2, s2, _) = (
        quantized_weights(3, INNER, HIDDEN, 4, block, False),
        quantized_weights(4, HIDDEN, INNER, 4, block, False),
    )
    inputs = [x, router, w1, s1.astype(np.float16), None, w2, s2.astype(np.float16)]
    attrs = {"k": 2, "expert_weight_bits": 4, "block_size": block, "weights_prepacked": 0, "accuracy_level": 1}
    assert_matches_onnxruntime("QMoE", inputs, attrs, tolerance=3e-3)


def test_separate_and_concatenated_gates():
    """Against interleaved gates, the only ones of onnxruntime's CPU provider, with the rows in that order."""
    x, router = floats(1, 7, HIDDEN, spread=1), floats(2, 7, EXPERTS, spread=2)
    fc1, bias1, fc2, bias2 = dense_weights(True)
    attrs = {"k": 2, "activation_type": "swiglu", "activation_alpha": 1.2, "activation_beta": 0.5}
    (expected,) = onnxruntime_outputs("MoE", [x, router, fc1, bias1, fc2, bias2], {**attrs, "swiglu_fusion": 1}, ("y",))
    gate, up, gate_bias, up_bias = fc1[:, 0::2], fc1[:, 1::2], bias1[:, 0::2], bias1[:, 1::2]
    side = [np.concatenate([gate, up], axis=1), np.concatenate([gate_bias, up_bias], axis=1)]
    (actual,) = module_outputs("MoE", [x, router, *side, fc2, bias2], {**attrs, "swiglu_fusion": 2}, ("y",))
    assert_outputs_close(expected, actual, 3e-6)
    (actual,) = module_outputs("MoE", [x, router, gate, gate_bias, fc2, bias2, up, up_bias], attrs, ("y",))
    assert_outputs_close(expected, actual, 3e-6)


def quantized_weights(seed, rows, columns, bits, block, zero_points):
    """Returns packed weights, scales and packed zero points of one projection."""
    rng = np.random.default_rng(seed)
    blocks = () if block is None else (columns // block,)
    scales = rng.uniform(0.5, 1.5, size=(EXPERTS, rows, *blocks)).astype(np.float32) / 2**bits / 3
    zeros = pack_bits(rng.integers(0, 2**bits, size=scales.shape), bits) if zero_points else None
    return pack_bits(rng.integers(0, 2**bits, size=(EXPERTS, rows, columns)), bits), scales, zeros


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("block", [None, 16, 32])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("fused", [False, True])
def test_q_moe(fused, bits, block, zero_points):
    x, router = floats(1, 7, HIDDEN, spread=1), floats(2, 7, EXPERTS, spread=2)
    first = quantized_weights(3, 2 * INNER if fused else INNER, HIDDEN, bits, block, zero_points)
    second = quantized_weights(4, HIDDEN, INNER, bits, block, zero_points)
    biases = floats(5, EXPERTS, 2 * INNER if fused else INNER), floats(6, EXPERTS, HIDDEN)
    inputs = [x, router, *first[:2], biases[0], *second[:2], biases[1], None, None, None, first[2], second[2]]
    attrs = {
        "k": 2,
        "expert_weight_bits": bits,
        "normalize_routing_weights": 1,
        "accuracy_level": 1,
        "weights_prepacked": 0,
    }
    attrs |= {"activation_type": "swiglu", "swiglu_fusion": 1} if fused else {"activation_type": "silu"}
    attrs |= {} if block is None else {"block_size": block}
    # onnxruntime rounds activations to 8 bits for 8-bit blocks, whatever the accuracy level.
    assert_matches_onnxruntime("QMoE", inputs, attrs, tolerance=2e-2 if bits == 8 and block else 1e-5)


def test_router_weights_replace_the_probabilities_as_scores():
    x, router, weights = floats(1, 7, HIDDEN, spread=1), floats(2, 7, EXPERTS, spread=2), np.abs(floats(9, 7, EXPERTS))
    first, second = quantized_weights(3, INNER, HIDDEN, 4, 32, False), quantized_weights(4, HIDDEN, INNER, 4, 32, False)
    inputs = [x, router, *first[:2], None, *second[:2], None, *[None] * 6, weights]
    for normalize in (0, 1):
        attrs = {"k": 2, "expert_weight_bits": 4, "block_size": 32, "weights_prepacked": 0, "accuracy_level": 1}
        assert_matches_onnxruntime("QMoE", inputs, {**attrs, "normalize_routing_weights": normalize}, tolerance=1e-5)


@pytest.mark.parametrize(("groups", "taken", "k"), [(1, 1, 3), (4, 2, 3), (2, 1, 2)])
def test_group_router(groups, taken, k):
    inputs = [floats(1, 9, 16, spread=2), floats(2, 16)]
    assert_matches_onnxruntime(
        "MoEGroupRouter", inputs, {"top_k": k, "n_group": groups, "topk_group": taken}, tolerance=1e-6
    )


def test_scores_of_all_experts():
    logits, bias = floats(1, 9, 16, spread=2), floats(2, 16)
    _, biased, scores = module_outputs("MoEGroupRouter", [logits, bias], {"top_k": 3}, ("", "biased", "scores"))
    assert_outputs_close(1 / (1 + np.exp(-logits)), scores, 1e-6)
    assert_outputs_close(1 / (1 + np.exp(-logits)) + bias, biased, 1e-6)
