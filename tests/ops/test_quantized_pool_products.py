"""Attention that multiplies quantized pools, against attention that dequantizes them: equal up to rounding."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from decoding import greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_rows import dequantized_rows

from mlx_transmuter.cache import CacheIndex, QuantizedFormat, QuantizedPool
from mlx_transmuter.ops.mlx import pooled_attention
from mlx_transmuter.ops.mlx.cache_masks import add_alibi_bias, visibility_mask
from mlx_transmuter.ops.mlx.pooled_attention import attend_over_pools
from mlx_transmuter.ops.mlx.quantized_pool_products import (
    MAX_TOKENS_WITHOUT_DEQUANTIZING,
    quantized_scores,
    quantized_weighted_sum,
)
from mlx_transmuter.runtime.decoder import Decoder

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# Of sums of up to 256 products of the type. MLX's CPU backend sums float16 in float16.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 3e-2, mx.bfloat16: 3e-2}


def random_array(draw: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.array(draw.normal(size=shape).astype(np.float32)).astype(dtype)


def set_quantized_products(enabled: bool):
    return mock.patch.object(pooled_attention, "_multiplies_quantized", return_value=enabled)


@settings(max_examples=120)
@given(data=st.data(), bits=st.sampled_from([4, 8]), group_size=st.sampled_from([32, 64, 128]))
def test_the_products_are_those_of_the_dequantized_rows(data, bits, group_size):
    """The rows are read bit by bit in numpy, with head sizes that groups divide and that they do not."""
    dim = data.draw(st.sampled_from([1, 8, 31, 32, 48, 64, 80, 96, 128, 160, 256]), label="dim")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    batch, queries, context = (data.draw(st.integers(1, n), label="sizes") for n in (4, 9, 70))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    quantized_format = QuantizedFormat.choose(bits, group_size, dim, dtype)
    pool = QuantizedPool(quantized_format.quantize(random_array(draw, (batch, context, dim), dtype)), quantized_format)
    scale = np.float16 if dtype == mx.float16 else np.float32
    rows = np.array(pool.rows)
    values = dequantized_rows(rows, bits, quantized_format.group_size, dim, scale).astype(np.float64)
    q = random_array(draw, (batch, queries, dim), dtype)
    weights = mx.softmax(random_array(draw, (batch, queries, context), mx.float32), axis=-1).astype(dtype)
    for product, left, right in (
        (quantized_scores(q, pool), q, values.swapaxes(1, 2)),
        (quantized_weighted_sum(weights, pool), weights, values),
    ):
        assert product.dtype == dtype
        left = np.array(left.astype(mx.float32)).astype(np.float64)
        errors = np.abs(np.array(product.astype(mx.float32)) - left @ right)
        assert product.shape == errors.shape
        # An element is scale · q + bias, and either term may be as large as the largest element of its group.
        assert (errors <= TOLERANCES[dtype] * np.abs(left).sum(-1, keepdims=True) * np.abs(right).max()).all()


@pytest.mark.parametrize("paged", [False, True])
@settings(max_examples=60, derandomize=True)
@given(data=st.data(), bits=st.sampled_from([4, 8]), seq=st.integers(1, MAX_TOKENS_WITHOUT_DEQUANTIZING))
def test_attention_over_quantized_pools_agrees_with_attention_over_dequantized_ones(paged, data, bits, seq):
    rows, kv, group = (data.draw(st.integers(1, 3), label="sizes") for _ in range(3))
    dim = data.draw(st.sampled_from([8, 32, 48, 64, 128]), label="dim")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    window, merge = data.draw(st.sampled_from([0, 1, 5])), data.draw(st.integers(0, 1))
    softcap = data.draw(st.sampled_from([0.0, 5.0]), label="softcap")
    is_draft = data.draw(st.booleans(), label="is_draft")
    draw = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    heads, capacity, block = kv * group, 32, 4 if paged else 32
    sinks = [mx.array(draw.normal(size=heads), mx.float32)] if data.draw(st.booleans(), label="has_sinks") else []
    lengths = draw.integers(0, capacity - seq, rows)
    counts = draw.integers(0, seq + 1, rows)
    pos = np.where(np.arange(seq) < counts[:, None], lengths[:, None] + np.arange(seq), -1).astype(np.int32)
    if paged:
        order = draw.permutation(2 * rows * capacity // block) * block
        slots = (order[:, None] + np.arange(block)).reshape(2, rows, capacity)
        index = CacheIndex.make(pos, slots[0])
        if is_draft:
            index = index.draft(slots[1, :, :seq], draw.random((rows, seq, seq)) < 0.7)
    else:
        index = CacheIndex.rows(capacity, [0] * rows).with_positions(pos)
    mask = visibility_mask(index, window=window)
    if data.draw(st.booleans(), label="has_slopes"):
        mask = add_alibi_bias(index, mask, slopes=draw.uniform(-1, 0, heads).tolist())
    quantized_format = QuantizedFormat.choose(bits, 32, dim, dtype)
    q = random_array(draw, (rows, heads, seq, dim), dtype)
    k, v = (random_array(draw, (rows, kv, seq, dim), dtype) for _ in "kv")
    shape = (kv * (1 + paged) * rows * capacity, dim)
    pool_rows = [quantized_format.quantize(random_array(draw, shape, dtype)) for _ in "kv"]
    results = []
    for enabled in (True, False):
        with set_quantized_products(enabled):
            inputs = (q, k, v, *(QuantizedPool(words, quantized_format) for words in pool_rows))
            inputs += (index.for_heads(kv, block), mask, *sinks)
            out, *new_pools = attend_over_pools(*inputs, scale=0.4, softcap=softcap, merge=merge)
            results.append((out, *(pool.rows for pool in new_pools)))
    (out, *pools), (expected, *expected_pools) = results
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    assert all(np.array_equal(np.array(a), np.array(b)) for a, b in zip(pools, expected_pools, strict=True))
    is_token = np.repeat((pos >= 0)[:, :, None], heads, axis=2)
    out, expected = (
        np.array(x.astype(mx.float32)).reshape(rows, *((seq, heads) if merge else (heads, seq)), dim)
        for x in (out, expected)
    )
    out, expected = (x if merge else x.swapaxes(1, 2) for x in (out, expected))
    np.testing.assert_allclose(out[is_token], expected[is_token], rtol=0, atol=TOLERANCES[dtype] * 4)


def count_quantized_matmuls():
    return mock.patch.object(mx, "quantized_matmul", side_effect=mx.quantized_matmul)


@pytest.mark.parametrize(("has_kernel", "seq", "products"), [(True, 1, 2), (True, 8, 2), (True, 9, 0), (False, 1, 0)])
def test_short_steps_multiply_quantized_pools_where_the_device_has_a_kernel(has_kernel, seq, products):
    quantized_format = QuantizedFormat.choose(8, 32, 32, mx.float32)
    pools = [QuantizedPool(mx.zeros((2 * 16, quantized_format.width), mx.uint32), quantized_format) for _ in "kv"]
    q, (k, v) = mx.ones((1, 4, seq, 32)), (mx.ones((1, 2, seq, 32)) for _ in "kv")
    index = CacheIndex.rows(16, [seq])
    with (
        mock.patch.object(pooled_attention, "_has_attention_kernel", return_value=has_kernel),
        count_quantized_matmuls() as called,
    ):
        out, *_ = attend_over_pools(q, k, v, *pools, index.for_heads(2, 16), visibility_mask(index), scale=1.0)
    assert called.call_count == products
    assert np.allclose(np.array(out), 1, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "gpt_oss"])
def test_decoders_generate_the_same_tokens_with_both_products(name, bits, loaded):
    """Models with softcaps, slopes, sinks and windows, in runs and in blocks of slots."""
    module = loaded(name).decoder
    prompts, new = [list(range(20, 33)), [40, 41]], [20, 20]
    for pages in ({}, {"paged": True, "block_size": 4}):
        texts = []
        for enabled in (True, False):
            with set_quantized_products(enabled), count_quantized_matmuls() as called:
                texts.append(greedy(Decoder(module, 2, kv_bits=bits).begin_session([40, 40], **pages), prompts, new))
            assert bool(called.call_count) == enabled
        assert texts[0] == texts[1]
