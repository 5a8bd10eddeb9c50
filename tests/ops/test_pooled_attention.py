"""Attention over pools, against attention in numpy over each row's own tokens."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_rows import dequantized_rows

from mlx_transmuter.cache import CacheIndex, QuantizedFormat, QuantizedPool
from mlx_transmuter.ops.mlx import pooled_attention
from mlx_transmuter.ops.mlx.cache_masks import add_alibi_bias, token_positions, visibility_mask
from mlx_transmuter.ops.mlx.logits import take_tokens
from mlx_transmuter.ops.mlx.pooled_attention import (
    attend_over_pools,
)

HEADS, KV, DIM = 4, 2, 8


def numpy_attention(q, k, v, position, scale, window=0, softcap=0.0, slopes=None, sinks=None):
    """The output [heads, dim] of a token at position `position` over k, v [kv, length, dim]."""
    out = np.zeros((HEADS, DIM))
    for head in range(HEADS):
        keys, values = k[head // (HEADS // KV)], v[head // (HEADS // KV)]
        scores = keys @ q[head] * scale
        scores = np.tanh(scores / softcap) * softcap if softcap else scores
        if slopes is not None:
            scores = scores + slopes[head] * (np.arange(len(scores)) - position)
        visible = np.arange(len(scores)) <= position
        if window:
            visible &= np.arange(len(scores)) > position - window
        weights = np.where(visible, np.exp(scores), 0)
        out[head] = weights @ values / (weights.sum() + (0 if sinks is None else np.exp(sinks[head])))
    return out


LOG2_E = np.float32(1.44269504)


def metal_attention(q, k, v, *, scale, mask, sinks=None):
    """mx.fast.scaled_dot_product_attention in the arithmetic of MLX's kernels on Metal, which the CPU does not have.

    Scores, an additive mask and sinks are multiplied by log2 e, in float32, for exp2; where a boolean mask is false, a
    score is the lowest finite number.
    """
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (np.array(x.astype(mx.float32)) for x in (q, k, v))
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    scores = (queries * np.float32(scale * LOG2_E)) @ keys.swapaxes(2, 3)
    if mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, np.finfo(np.float32).min)
    else:
        assert mask.dtype == q.dtype
        scores = scores + np.array(mask.astype(mx.float32)) * LOG2_E
    largest, extra = scores.max(-1, keepdims=True), np.float32(0)
    if sinks is not None:
        sink = np.array(sinks.astype(mx.float32))[:, None, None] * LOG2_E
        largest = np.maximum(largest, sink)
        extra = np.exp2(sink - largest)
    weights = np.exp2(scores - largest)
    out = weights @ values / (weights.sum(-1, keepdims=True) + extra)
    assert np.isfinite(out).all(), "of padding too: its keys and values reach the rows beside it in the next layer"
    return mx.array(out).astype(q.dtype)


@pytest.fixture(params=["unfused", "mx.fast", "Metal's kernel"], autouse=True)
def all_attention_paths(request):
    """The ways of attention: the one used on the CPU, mx.fast's, which the CPU has too, and its kernel on Metal."""
    with mock.patch.object(pooled_attention, "_has_attention_kernel", return_value=request.param != "unfused"):
        if request.param != "Metal's kernel":
            yield
            return
        with (
            np.errstate(over="raise", invalid="raise"),
            mock.patch.object(mx.fast, "scaled_dot_product_attention", metal_attention),
        ):
            yield


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_padding_token_under_alibi_is_finite(dtype):
    """Its row of the mask hides every column."""
    index = CacheIndex.rows(4, [0, 0]).with_positions(mx.array([[0, 1, 2], [-1, -1, 0]]))
    mask = add_alibi_bias(index, visibility_mask(index), slopes=[2.0**-i for i in range(HEADS)])
    rng = np.random.default_rng(0)
    q, k, v = (mx.array(rng.normal(size=(2, n, 3, DIM))).astype(dtype) for n in (HEADS, KV, KV))
    pools = [mx.zeros((2 * KV * 4 + 1, DIM), dtype) for _ in range(2)]
    head_index = index.for_heads(KV, 4).with_spare_pool_row(2 * KV * 4)
    out, *_ = attend_over_pools(q, k, v, *pools, head_index, mask, scale=0.5)
    assert mx.isfinite(out).all()
    expected = numpy_attention(
        *(np.array(x.astype(mx.float32)) for x in (q[0, :, 2], k[0], v[0])),
        2,
        0.5,
        slopes=[2.0**-i for i in range(HEADS)],
    )
    tolerance = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}[dtype]  # the type's rounding of the output
    np.testing.assert_allclose(np.array(out.astype(mx.float32))[0, :, 2], expected, atol=tolerance)


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=60)
@given(data=st.data())
def test_steps_over_pools_are_attention_over_each_row_alone(paged, data):
    window = data.draw(st.sampled_from([0, 1, 3, 7]), label="window")
    softcap = data.draw(st.sampled_from([0.0, 2.0]), label="softcap")
    has_slopes = data.draw(st.booleans(), label="has_slopes")
    has_sinks = data.draw(st.booleans(), label="has_sinks")
    pool_form = data.draw(st.sampled_from(["two pools", "one pool", "one pool of one tensor"]), label="pool_form")
    chunks = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="chunks")
    rows = data.draw(st.integers(1, 3), label="rows")
    counts = [[data.draw(st.integers(0, chunk)) for chunk in chunks] for _ in range(rows)]
    draw = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    slopes = draw.uniform(-1, 0, HEADS).tolist() if has_slopes else None
    sinks = draw.normal(size=HEADS).astype(np.float32) if has_sinks else None
    capacity, block = 32, 4 if paged else 32
    order = draw.permutation(rows * capacity // block) * block
    table = (order.reshape(rows, -1, 1) + np.arange(block)).reshape(rows, capacity).astype(np.int32)
    spare = data.draw(st.booleans(), label="spare")
    pool_heads, pool_names = (KV, "kv") if pool_form == "two pools" else (2 * KV, "k")
    pools = [mx.zeros((pool_heads * rows * capacity + spare, DIM)) for _ in pool_names]
    bits = data.draw(st.sampled_from([None, 4, 8]), label="bits")
    quantized_format = bits and QuantizedFormat.choose(bits, 32, DIM, mx.float32)
    if quantized_format:
        shapes = [(pool.shape[0], quantized_format.width) for pool in pools]
        pools = [QuantizedPool(mx.zeros(shape, mx.uint32), quantized_format) for shape in shapes]
    history = [(np.zeros((KV, 0, DIM)), np.zeros((KV, 0, DIM))) for _ in range(rows)]
    lengths = np.zeros(rows, np.int32)
    scale = 0.4
    for step, chunk in enumerate(chunks):
        new = np.array([counts[row][step] for row in range(rows)])
        q = draw.normal(size=(rows, HEADS, chunk, DIM)).astype(np.float32)
        k, v = (draw.normal(size=(rows, KV, chunk, DIM)).astype(np.float32) for _ in "kv")
        pos = np.where(np.arange(chunk) < new[:, None], lengths[:, None] + np.arange(chunk), -1).astype(np.int32)
        index = (
            CacheIndex.make(pos, table)
            if paged
            else CacheIndex.rows(capacity, [0] * rows).limit_context(24).with_positions(pos)
        )
        mask = visibility_mask(index, window=window)
        if slopes is not None:
            mask = add_alibi_bias(index, mask, slopes=slopes)
        head_index = index.for_heads(KV, block)
        if pool_form != "two pools":
            head_index = head_index.for_key_value_pool(KV * rows * capacity)
        head_index = head_index.with_spare_pool_row(pool_heads * rows * capacity) if spare else head_index
        pool_inputs = pools if len(pools) == 2 else [pools[0], None]
        sink_inputs = () if sinks is None else (mx.array(sinks),)
        one_tensor = [mx.array(np.concatenate([k, v], axis=1)), None]
        new_inputs = one_tensor if pool_form == "one pool of one tensor" else [mx.array(k), mx.array(v)]
        inputs = (mx.array(q), *new_inputs, *pool_inputs, head_index, mask, *sink_inputs)
        out, *pools = attend_over_pools(*inputs, scale=scale, softcap=softcap)
        out = np.array(out)
        if quantized_format:  # attention reads quantized values, also those of the call's own tokens
            rows_of_words = (np.array(quantized_format.quantize(mx.array(x))) for x in (k, v))
            k, v = (dequantized_rows(words, bits, 32, DIM, np.float32) for words in rows_of_words)
        assert np.array_equal(np.array(token_positions(index)), np.maximum(pos, 0))
        for row in range(rows):
            keys, values = history[row]
            new_keys, new_values = (x[row, :, : new[row]] for x in (k, v))
            history[row] = (np.concatenate([keys, new_keys], axis=1), np.concatenate([values, new_values], axis=1))
            for i in range(new[row]):
                position = int(lengths[row]) + i
                expected = numpy_attention(q[row, :, i], *history[row], position, scale, window, softcap, slopes, sinks)
                np.testing.assert_allclose(out[row, :, i], expected, rtol=2e-5, atol=2e-5)
            assert np.isfinite(out[row]).all()  # a padding token's output is unspecified, but never NaN
        lengths = lengths + new


def test_queries_may_have_rows_and_heads_on_one_axis():
    draw = np.random.default_rng(0)
    q = mx.array(draw.normal(size=(2 * HEADS, 3, DIM)), mx.float32)
    k, v = (mx.array(draw.normal(size=(2, KV, 3, DIM)), mx.float32) for _ in "kv")
    index = CacheIndex.rows(4, [3, 3])
    pools = [mx.zeros((KV * 8, DIM)) for _ in "kv"]
    args = (k, v, *pools, index.for_heads(KV, 4), visibility_mask(index))
    flat = attend_over_pools(q, *args, scale=1.0)[0]
    full = attend_over_pools(q.reshape(2, HEADS, 3, DIM), *args, scale=1.0)[0]
    assert flat.shape == (2 * HEADS, 3, DIM)
    assert np.array_equal(np.array(flat), np.array(full).reshape(2 * HEADS, 3, DIM))


def test_last_takes_the_named_tokens_of_each_row():
    x = mx.arange(2 * 3 * 2).reshape(2, 3, 2).astype(mx.float32)
    assert np.array_equal(np.array(take_tokens(x, mx.array([[2], [0]]))), [[[4, 5]], [[6, 7]]])
    assert np.array_equal(np.array(take_tokens(x, mx.array([[0, 2], [1, 1]]))), [[[0, 1], [4, 5]], [[8, 9], [8, 9]]])


@pytest.mark.parametrize("merge", [0, 1])
@pytest.mark.parametrize("seq", [1, 2, 3, 130])
@pytest.mark.parametrize("context", [511, 512, 700])
def test_few_and_many_queries_over_many_columns_agree_with_numpy(context, seq, merge):
    """Shapes whose product the CPU computes transposed, and those that use the exponential written for the CPU."""
    draw = np.random.default_rng(context + seq)
    rows, block = 2, 1024
    stored = [draw.normal(size=(rows, KV, block, DIM)).astype(np.float32) for _ in "kv"]
    pools = [mx.array(x.reshape(-1, DIM)) for x in stored]
    q = draw.normal(size=(rows, HEADS, seq, DIM)).astype(np.float32)
    new = [draw.normal(size=(rows, KV, seq, DIM)).astype(np.float32) for _ in "kv"]
    lengths = np.array([context - seq, 300])
    pos = (lengths[:, None] + np.arange(seq)).astype(np.int32)
    index = CacheIndex.rows(block, [0] * rows).limit_context(context).with_positions(pos)
    out, *_ = attend_over_pools(
        *map(mx.array, (q, *new)), *pools, index.for_heads(KV, block), visibility_mask(index), scale=0.4, merge=merge
    )
    out = np.array(out)
    assert out.shape == ((rows, seq, HEADS * DIM) if merge else (rows, HEADS, seq, DIM))
    out = out.reshape(rows, seq, HEADS, DIM) if merge else out.swapaxes(1, 2)
    for row in range(rows):
        k, v = (np.concatenate([x[row, :, : lengths[row]], y[row]], axis=1) for x, y in zip(stored, new, strict=True))
        for i in range(seq):
            expected = numpy_attention(q[row, :, i], k, v, pos[row, i], 0.4)
            np.testing.assert_allclose(out[row, i], expected, rtol=2e-5, atol=2e-5)


def test_unscaled_scores_beyond_float16_do_not_overflow():
    """Raw products of queries and keys reach 10⁵ in some models (Qwen2's), and float16 ends at 65,504."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(1, heads, 3, DIM)).astype(np.float16) for heads in (HEADS, KV, KV))
    q, k = q * np.float16(200), k * np.float16(200)
    scale = 1e-4
    index = CacheIndex.rows(4, [3])
    pools = [mx.zeros((KV * 4, DIM), mx.float16) for _ in "kv"]
    out, *_ = attend_over_pools(
        *map(mx.array, (q, k, v)), *pools, index.for_heads(KV, 4), visibility_mask(index), scale=scale
    )
    assert np.abs(q.astype(np.float32) @ k.astype(np.float32).repeat(HEADS // KV, 1).swapaxes(2, 3)).max() > 65504
    for i in range(3):
        expected = numpy_attention(*(x.astype(np.float64) for x in (q[0, :, i], k[0], v[0])), i, scale)
        np.testing.assert_allclose(np.array(out[0, :, i]), expected, atol=2e-2)
