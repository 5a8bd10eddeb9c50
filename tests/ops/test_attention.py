"""Attention and rotary positions against loops over NumPy arrays: masks, rows that see nothing, caches, windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_node import run_node

SETTINGS = settings(max_examples=80, derandomize=True)


def brute_force_attention(q, k, v, bias, scale, softcap):
    """One query and one column at a time, float64; bias [batch, heads, queries, columns], -inf where nothing is seen."""
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    y = np.zeros((batch, heads, queries, v.shape[-1]))
    for b, h, i in np.ndindex(batch, heads, queries):
        row = bias[b, h, i]
        if np.isneginf(row).all():
            continue
        scores = np.array([np.dot(q[b, h, i], column) * scale for column in k[b, h // group].astype(np.float64)])
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores + row - (scores + row).max())
        y[b, h, i] = weights @ v[b, h // group] / weights.sum()
    return y


@st.composite
def attention_cases(draw):
    batch, kv, group, dim = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), 4
    queries, past = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    cache = draw(st.sampled_from(["none", "past", "filled"]))
    fresh = queries if cache != "filled" else queries + past
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def floats(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k, v = floats(batch, kv * group, queries, dim), floats(batch, kv, fresh, dim), floats(batch, kv, fresh, dim + 2)
    inputs = {"q": q, "k": k, "v": v}
    columns, offset = fresh, np.zeros(batch, int)
    bias = None
    if cache == "past":
        inputs |= {"past_key": floats(batch, kv, past, dim), "past_value": floats(batch, kv, past, dim + 2)}
        columns, offset = fresh + past, offset + past
    if cache == "filled":
        # Fewer columns may be filled than there are queries: the first of these see nothing then.
        lengths = np.array([draw(st.integers(0, columns)) for _ in range(batch)])
        inputs["nonpad_kv_seqlen"] = lengths
        offset = lengths - queries
    bias = np.zeros((batch, kv * group, queries, columns))
    if cache == "filled":
        for b in range(batch):
            bias[b, :, :, lengths[b] :] = -np.inf
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind != "none":
        width = columns - draw(st.integers(0, 1)) if columns > 1 else columns
        lead = draw(st.sampled_from([(), (1, 1), (batch, 1), (1, kv * group), (batch, kv * group)]))
        shape = (*lead, queries, width)
        if kind == "bool":
            mask = rng.random(shape) < 0.6
            added = np.where(mask, 0, -np.inf)
        else:
            mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.normal(size=shape)).astype(np.float32)
            added = mask.astype(np.float64)
        # Columns beyond a short mask are not seen.
        bias = bias + np.concatenate([added, np.full((*shape[:-1], columns - width), -np.inf)], axis=-1)
        inputs["mask"] = mask
    attrs = {"is_causal": int(draw(st.booleans()))}
    left, right = draw(st.integers(-1, 2)), draw(st.integers(-1, 2))
    for b, i, j in np.ndindex(batch, queries, columns):
        distance = j - (i + offset[b])
        if (
            (attrs["is_causal"] and distance > 0)
            or (left >= 0 and -distance > left)
            or (right >= 0 and distance > right)
        ):
            bias[b, :, i, j] = -np.inf
    attrs |= {"left_window_size": left, "right_window_size": right}
    if draw(st.booleans()):
        attrs["scale"] = 0.3
    if draw(st.booleans()):
        attrs["softcap"] = 1.5
    return inputs, attrs, bias


INPUT_NAMES = ("q", "k", "v", "mask", "past_key", "past_value", "nonpad_kv_seqlen")


@SETTINGS
@given(attention_cases())
def test_attention(case):
    inputs, attrs, bias = case
    k, v = inputs["k"], inputs["v"]
    if "past_key" in inputs:
        k, v = (np.concatenate([inputs[past], new], axis=2) for past, new in (("past_key", k), ("past_value", v)))
    truth = brute_force_attention(
        inputs["q"].astype(np.float64), k, v, bias, attrs.get("scale", 0.5), attrs.get("softcap", 0)
    )
    given = [inputs.get(name) for name in INPUT_NAMES]
    while given[-1] is None:
        given.pop()
    y, present_key, present_value = run_node("Attention", given, attrs, ("y", "present_key", "present_value"), opset=25)
    np.testing.assert_allclose(y, truth, atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(present_key, k)
    np.testing.assert_array_equal(present_value, v)
    # Three axes hold the same numbers, heads beside one another.
    flat = [x if i > 2 else x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for i, x in enumerate(given)]
    heads = {"q_num_heads": inputs["q"].shape[1], "kv_num_heads": inputs["k"].shape[1]}
    (joined,) = run_node("Attention", flat, attrs | heads, opset=25)
    np.testing.assert_allclose(joined, truth.swapaxes(1, 2).reshape(joined.shape), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_that_are_shown(mode):
    rng = np.random.default_rng(mode)
    q, k, v = (rng.normal(size=(1, 2, 3, 4)).astype(np.float32) for _ in range(3))
    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    names = ("y", "key", "value", "scores")
    attrs = {"qk_matmul_output_mode": mode, "softcap": 2.0}
    y, _, _, scores = run_node("Attention", [q, k, v, mask], attrs, names, opset=24)
    raw = q.astype(np.float64) @ k.swapaxes(-1, -2) / 2
    capped = 2 * np.tanh(raw / 2)
    masked = np.where(mask, capped, -np.inf)
    weights = np.exp(masked - np.nan_to_num(masked.max(-1, keepdims=True), neginf=0))
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(scores, (raw, capped, masked, weights)[mode], atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(y, weights @ v, atol=2e-6, rtol=1e-5)
    assert not y[0, 0, 1].any()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("part", [0, 4])
@pytest.mark.parametrize("by_position", [True, False])
def test_rotary_positions(interleaved, part, by_position):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 6)).astype(np.float32)
    half = (part or 6) // 2
    angles = rng.normal(size=(9, half))
    positions = rng.integers(0, 9, (2, 5))
    truth = x.copy().astype(np.float64)
    for b, h, t in np.ndindex(2, 3, 5):
        for i in range(half):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turn = np.exp(1j * angles[positions[b, t], i]) * complex(x[b, h, t, one], x[b, h, t, other])
            truth[b, h, t, one], truth[b, h, t, other] = turn.real, turn.imag
    caches = [f(angles if by_position else angles[positions]).astype(np.float32) for f in (np.cos, np.sin)]
    rest = [positions.astype(np.int64)] if by_position else []
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": part}
    np.testing.assert_allclose(run_node("RotaryEmbedding", [x, *caches, *rest], attrs)[0], truth, atol=1e-6)
    flat = x.swapaxes(1, 2).reshape(2, 5, 18)
    (y,) = run_node("RotaryEmbedding", [flat, *caches, *rest], attrs | {"num_heads": 3})
    np.testing.assert_allclose(y, truth.swapaxes(1, 2).reshape(2, 5, 18), atol=1e-6)
