"""Attention and rotary embeddings against loops over NumPy arrays: masks, rows without columns, caches, windows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_node import run_node
from random_inputs import float_source

SETTINGS = settings(max_examples=80, derandomize=True)


def brute_force_attention(q, k, v, bias, scale, softcap):
    """Returns attention computed query by query in float64; bias: [batch, heads, queries, columns], -inf where hidden."""
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
    """Draws inputs by name, attributes, and the bias [batch, heads, queries, columns] that they amount to."""
    batch, kv, group, dim = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), 4
    queries, past = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    cache = draw(st.sampled_from(["none", "past", "filled"]))
    new_columns = queries if cache != "filled" else queries + past
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    floats = float_source(rng)
    inputs = {
        "q": floats(batch, kv * group, queries, dim),
        "k": floats(batch, kv, new_columns, dim),
        "v": floats(batch, kv, new_columns, dim + 2),
    }
    columns, offset = new_columns, np.zeros(batch, int)
    if cache == "past":
        inputs |= {"past_key": floats(batch, kv, past, dim), "past_value": floats(batch, kv, past, dim + 2)}
        columns, offset = new_columns + past, offset + past
    bias = np.zeros((batch, kv * group, queries, columns))
    if cache == "filled":
        # Fewer columns may be filled than there are queries: the first of these then see no column.
        lengths = np.array([draw(st.integers(0, columns)) for _ in range(batch)])
        inputs["nonpad_kv_seqlen"] = lengths
        offset = lengths - queries
        for b in range(batch):
            bias[b, :, :, lengths[b] :] = -np.inf
    mask, mask_bias = draw_mask(draw, rng, bias.shape)
    if mask is not None:
        inputs["mask"] = mask
        bias = bias + mask_bias
    window = {
        "is_causal": int(draw(st.booleans())),
        "left_window_size": draw(st.integers(-1, 2)),
        "right_window_size": draw(st.integers(-1, 2)),
    }
    for b, i, j in np.ndindex(batch, queries, columns):
        if is_hidden_by_position(j - (i + offset[b]), **window):
            bias[b, :, i, j] = -np.inf
    scores = draw(st.sampled_from([{}, {"scale": 0.3}, {"softcap": 1.5}, {"scale": 0.3, "softcap": 1.5}]))
    return inputs, window | scores, bias


def draw_mask(draw, rng, shape):
    """Draws a bool or float mask, maybe without batch, heads or the last column, and its bias; or (None, None)."""
    batch, heads, queries, columns = shape
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind == "none":
        return None, None
    width = columns - draw(st.integers(0, 1)) if columns > 1 else columns
    lead = draw(st.sampled_from([(), (1, 1), (batch, 1), (1, heads), (batch, heads)]))
    mask_shape = (*lead, queries, width)
    if kind == "bool":
        mask = rng.random(mask_shape) < 0.6
        bias = np.where(mask, 0, -np.inf)
    else:
        mask = np.where(rng.random(mask_shape) < 0.3, -np.inf, rng.normal(size=mask_shape)).astype(np.float32)
        bias = mask.astype(np.float64)
    # Columns past the end of a short mask are hidden.
    hidden = np.full((*mask_shape[:-1], columns - width), -np.inf)
    return mask, np.concatenate([bias, hidden], axis=-1)


def is_hidden_by_position(distance, is_causal, left_window_size, right_window_size):
    """Returns whether a column is hidden from a query, distance being its position minus the query's."""
    too_far_left = left_window_size >= 0 and -distance > left_window_size
    too_far_right = right_window_size >= 0 and distance > right_window_size
    return (is_causal and distance > 0) or too_far_left or too_far_right


INPUT_NAMES = ("q", "k", "v", "mask", "past_key", "past_value", "nonpad_kv_seqlen")


@SETTINGS
@given(attention_cases())
def test_attention(case):
    inputs, attrs, bias = case
    k, v = inputs["k"], inputs["v"]
    if "past_key" in inputs:
        k, v = (np.concatenate([inputs[past], new], axis=2) for past, new in (("past_key", k), ("past_value", v)))
    expected = brute_force_attention(
        inputs["q"].astype(np.float64), k, v, bias, attrs.get("scale", 0.5), attrs.get("softcap", 0)
    )
    arrays = [inputs.get(name) for name in INPUT_NAMES]
    while arrays[-1] is None:
        arrays.pop()
    y, present_key, present_value = run_node(
        "Attention", arrays, attrs, ("y", "present_key", "present_value"), opset=25
    )
    np.testing.assert_allclose(y, expected, atol=2e-6, rtol=1e-5)
    np.testing.assert_array_equal(present_key, k)
    np.testing.assert_array_equal(present_value, v)
    # The same inputs with three axes, the heads one after another on the last.
    flat = [x if i > 2 else x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1) for i, x in enumerate(arrays)]
    heads = {"q_num_heads": inputs["q"].shape[1], "kv_num_heads": inputs["k"].shape[1]}
    (joined,) = run_node("Attention", flat, attrs | heads, opset=25)
    np.testing.assert_allclose(joined, expected.swapaxes(1, 2).reshape(joined.shape), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_the_scores_of_each_stage(mode):
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
def test_rotary_embedding(interleaved, part, by_position):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, 6)).astype(np.float32)
    half = (part or 6) // 2
    angles = rng.normal(size=(9, half))
    positions = rng.integers(0, 9, (2, 5))
    expected = x.copy().astype(np.float64)
    for b, h, t in np.ndindex(2, 3, 5):
        for i in range(half):
            one, other = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turn = np.exp(1j * angles[positions[b, t], i]) * complex(x[b, h, t, one], x[b, h, t, other])
            expected[b, h, t, one], expected[b, h, t, other] = turn.real, turn.imag
    caches = [f(angles if by_position else angles[positions]).astype(np.float32) for f in (np.cos, np.sin)]
    rest = [positions.astype(np.int64)] if by_position else []
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": part}
    np.testing.assert_allclose(run_node("RotaryEmbedding", [x, *caches, *rest], attrs)[0], expected, atol=1e-6)
    flat = x.swapaxes(1, 2).reshape(2, 5, 18)
    (y,) = run_node("RotaryEmbedding", [flat, *caches, *rest], attrs | {"num_heads": 3})
    np.testing.assert_allclose(y, expected.swapaxes(1, 2).reshape(2, 5, 18), atol=1e-6)
