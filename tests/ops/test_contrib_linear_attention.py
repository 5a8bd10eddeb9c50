"""LinearAttention and GatedDeltaNet against onnxruntime, which computes them token by token."""

import numpy as np
import pytest
from onnxruntime_node import assert_matches_onnxruntime, assert_outputs_close, module_outputs, onnxruntime_outputs
from random_inputs import floats

B, DK, DV = 2, 8, 6
OUTPUTS = ("y", "state")


def unit_keys(x, heads):
    """Returns x with each head's keys normalized to unit vectors, as the delta rules need."""
    by_head = x.reshape(*x.shape[:-1], heads, -1)
    return (by_head / np.linalg.norm(by_head, axis=-1, keepdims=True)).reshape(x.shape).astype(np.float32)


def linear_attention_inputs(seq, heads=2, kv_heads=2, past=True, by_channel=False, strong=1.0, alike=False):
    key = unit_keys(floats(2, B, seq, kv_heads * DK), kv_heads)
    if alike:
        key = np.broadcast_to(key[:, :1], key.shape).copy()
    decay = -np.abs(floats(5, B, seq, kv_heads * (DK if by_channel else 1))) * strong
    beta = 1 / (1 + np.exp(-floats(6, B, seq, kv_heads)))
    state = floats(4, B, kv_heads, DK, DV) if past else None
    return [floats(1, B, seq, heads * DK), key, floats(3, B, seq, kv_heads * DV), state, decay, beta.astype(np.float32)]


def linear_attention_attrs(heads=2, kv_heads=2, **others):
    return {"q_num_heads": heads, "kv_num_heads": kv_heads, **others}


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("seq", [1, 3, 16, 100])
@pytest.mark.parametrize("by_channel", [False, True])
def test_update_rules(by_channel, seq, rule):
    case = linear_attention_inputs(seq, by_channel=by_channel)
    case = [
        None if (i == 4 and "gated" not in rule) or (i == 5 and "delta" not in rule) else x for i, x in enumerate(case)
    ]
    assert_matches_onnxruntime(
        "LinearAttention", case, linear_attention_attrs(update_rule=rule), OUTPUTS, tolerance=2e-5
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("seq", [1, 20])
def test_shared_heads(seq, heads, kv_heads):
    assert_matches_onnxruntime(
        "LinearAttention",
        linear_attention_inputs(seq, heads, kv_heads),
        linear_attention_attrs(heads, kv_heads, scale=0.5),
        OUTPUTS,
        tolerance=2e-5,
    )
    assert_matches_onnxruntime(
        "LinearAttention",
        linear_attention_inputs(seq, heads, kv_heads, past=False),
        linear_attention_attrs(heads, kv_heads),
        OUTPUTS,
        tolerance=2e-5,
    )


@pytest.mark.parametrize("by_channel", [False, True])
def test_strong_decays_and_similar_keys(by_channel):
    """Ratios of decays would overflow here, and a power series for the inverse would lose all digits."""
    assert_matches_onnxruntime(
        "LinearAttention",
        linear_attention_inputs(130, by_channel=by_channel, strong=40.0),
        linear_attention_attrs(),
        OUTPUTS,
        tolerance=2e-5,
    )
    weak = linear_attention_inputs(130, by_channel=by_channel, strong=0.001, alike=True)
    weak[5][:] = 1.0
    assert_matches_onnxruntime("LinearAttention", weak, linear_attention_attrs(), OUTPUTS, tolerance=1e-4)


@pytest.mark.parametrize("seq", [1, 2, 7])
def test_states_of_the_last_tokens(seq):
    """onnxruntime's CPU provider has no state_window: expected are its states after the tokens up to each."""
    case = linear_attention_inputs(seq)
    slots = np.stack([floats(7 + i, B, 2, DK, DV) for i in range(3)])  # only the last is read
    y, states = module_outputs(
        "LinearAttention", [*case[:3], slots, *case[4:]], linear_attention_attrs(state_window=3), OUTPUTS
    )
    for slot in range(3):
        length = seq - 3 + slot + 1
        if length < 1:
            assert not states[slot].any()
            continue
        prefix = [slots[-1] if i == 3 else x[:, :length] for i, x in enumerate(case)]
        expected = onnxruntime_outputs("LinearAttention", prefix, linear_attention_attrs(), OUTPUTS)
        assert_outputs_close(expected[0], y[:, :length], 2e-5)
        assert_outputs_close(expected[1], states[slot], 2e-5)


def test_float16():
    case = [x.astype(np.float16) for x in linear_attention_inputs(20)]
    assert_matches_onnxruntime("LinearAttention", case, linear_attention_attrs(), OUTPUTS, tolerance=3e-3)


@pytest.mark.parametrize("beta", [False, True])
def test_gate(beta):
    case = [floats(1, B, 3, 4), floats(2, 4), floats(3, 4), *([floats(4, B, 3, 4)] if beta else [])]
    assert_matches_onnxruntime(
        "LinearAttentionGate", case, {}, ("decay", "beta") if beta else ("decay",), tolerance=1e-6
    )


HEADS, V_HEADS = 2, 4


def gated_delta_net_inputs(lead, by_channel=False, state=None):
    """Returns the inputs of GatedDeltaNet up to the state; lead: the sizes of the axes before the heads."""
    decay = -np.abs(floats(4, *lead, V_HEADS, *([DK] if by_channel else [])))
    beta = 1 / (1 + np.exp(-floats(5, *lead, V_HEADS)))
    q, k, v = floats(1, *lead, HEADS, DK), unit_keys(floats(2, *lead, HEADS, DK), 1), floats(3, *lead, V_HEADS, DV)
    return [q, k, v, None, decay, beta, None if state is None else floats(6, state, V_HEADS, DV, DK)]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("lead", "state"), [((B, 20), B), ((40,), B), ((1, 1), 1)])
def test_gated_delta_net(lead, state, rule, by_channel):
    case = gated_delta_net_inputs(lead, by_channel, state)
    case = [
        None if (i == 4 and "gated" not in rule) or (i == 5 and "delta" not in rule) else x for i, x in enumerate(case)
    ]
    assert_matches_onnxruntime("GatedDeltaNet", case, {"update_rule": rule, "qk_l2_norm": 1}, OUTPUTS, tolerance=2e-5)


def test_gated_delta_net_over_packed_sequences():
    case = gated_delta_net_inputs((40,), state=3)
    case[3] = np.array([0, 7, 8, 40], dtype=np.int32)
    assert_matches_onnxruntime("GatedDeltaNet", case, {"scale": 0.3}, OUTPUTS, tolerance=2e-5)


def test_gated_delta_net_with_packed_projections():
    q, k, v, *rest = gated_delta_net_inputs((20,), state=1)
    packed = np.concatenate([x.reshape(20, -1) for x in (q, k, v)], axis=1)
    assert_matches_onnxruntime("GatedDeltaNet", [packed, None, None, *rest], {}, OUTPUTS, tolerance=2e-5)


@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_gates_of_gated_delta_net(by_channel, activation):
    case = gated_delta_net_inputs((B, 20), by_channel, B)
    case += [floats(7, V_HEADS, spread=0.3), floats(8, *([V_HEADS, DK] if by_channel else [V_HEADS]))]
    attrs = {"gate_activation": activation, "beta_activation": "sigmoid", "qk_l2_norm": 1}
    assert_matches_onnxruntime("GatedDeltaNet", case, attrs, OUTPUTS, tolerance=2e-5)
