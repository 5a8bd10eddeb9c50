"""Packed vectors: their rows are what Packing's words say, read bit by bit in numpy, and near what was packed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_rows import dequantized_rows

from mlx_transmuter.cache import CacheError, CacheIndex, QuantizedFormat, QuantizedPool

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def expected_group_size(group_size: int, dim: int) -> int:
    return max([size for size in (32, 64, 128) if size <= group_size and dim % size == 0] or [32])


@settings(max_examples=150)
@given(data=st.data(), bits=st.sampled_from([4, 8]), group_size=st.sampled_from([32, 64, 128]))
def test_a_row_is_what_it_says_and_near_the_vector(data, bits, group_size):
    dim = data.draw(st.sampled_from([1, 8, 16, 31, 32, 48, 64, 80, 96, 128, 160, 256]), label="dim")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    draw = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 50.0]), label="scale")
    shape = (2, data.draw(st.integers(1, 3)), dim)
    values = mx.array((draw.normal(size=shape) + draw.normal(size=(2, 1, 1))) * scale).astype(dtype)
    packing = QuantizedFormat.choose(bits, group_size, dim, dtype)
    assert packing.group_size == expected_group_size(group_size, dim)
    rows = packing.quantize(values)
    assert (rows.shape, rows.dtype) == ((*shape[:2], packing.width), mx.uint32)
    found = packing.dequantize(rows)
    assert (found.shape, found.dtype) == (values.shape, dtype)
    found, values = (np.array(x.astype(mx.float32)) for x in (found, values))
    wanted = dequantized_rows(
        np.array(rows), bits, packing.group_size, dim, np.float16 if dtype == mx.float16 else np.float32
    )
    tolerance = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    assert np.abs(found - wanted).max() <= tolerance * np.abs(values).max()
    for start in range(0, dim, packing.group_size):
        group, near = values[..., start : start + packing.group_size], found[..., start : start + packing.group_size]
        # A group's range holds 0: a scale is such that 0 is a step of it.
        span = np.maximum(group.max(-1), 0) - np.minimum(group.min(-1), 0)
        step = span / (2**bits - 1)
        assert (np.abs(near - group).max(-1) <= 1.1 * step + tolerance * np.abs(values).max()).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_zeros_is_a_vector_of_zeros_and_a_constant_is_itself(bits):
    packing = QuantizedFormat.choose(bits, 64, 48, mx.float32)
    assert not np.array(packing.dequantize(mx.zeros((2, packing.width), mx.uint32))).any()
    np.testing.assert_allclose(np.array(packing.dequantize(packing.quantize(mx.full((1, 48), 3.7)))), 3.7, rtol=1e-3)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 64), (16, 64), (True, 64), (8, 16), (4, 0), (8, None)])
def test_other_bits_and_groups_are_refused(bits, group_size):
    with pytest.raises(CacheError, match=r"kv_bits|kv_group_size"):
        QuantizedFormat.choose(bits, group_size, 64, mx.float32)


def test_a_packed_pool_reads_what_was_stored_whatever_else_it_holds():
    """Rows that nobody sees may be NaN when read as floats."""
    packing = QuantizedFormat.choose(8, 32, 16, mx.float32)
    pool = QuantizedPool(mx.full((12, packing.width), 2**32 - 1, mx.uint32), packing)
    values = mx.array(np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32))
    index = CacheIndex.make([[0, 1, 2], [-1, 0, 1]], [[7, 3, 1, -1], [0, 11, -1, 5]])
    seen, after = pool.extend(index, values)
    seen, wanted = np.array(seen), np.array(packing.dequantize(packing.quantize(values)))
    assert np.array_equal(seen[0, :3], wanted[0])
    assert np.array_equal(seen[1, :2], wanted[1, 1:])
    assert not seen[0, 3:].any()
    assert not seen[1, 2:].any()
    assert (np.array(after.rows) == 2**32 - 1).all(axis=1).sum() == 12 - 5
