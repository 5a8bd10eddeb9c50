"""QuantizedFormat: rows have the documented layout, read bit by bit in numpy, and values near the vectors."""

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
def test_a_row_has_the_documented_layout_and_values_near_the_vector(data, bits, group_size):
    dim = data.draw(st.sampled_from([1, 8, 16, 31, 32, 48, 64, 80, 96, 128, 160, 256]), label="dim")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 50.0]), label="scale")
    shape = (2, data.draw(st.integers(1, 3)), dim)
    values = mx.array((rng.normal(size=shape) + rng.normal(size=(2, 1, 1))) * scale).astype(dtype)
    quantized_format = QuantizedFormat.choose(bits, group_size, dim, dtype)
    assert quantized_format.group_size == expected_group_size(group_size, dim)
    rows = quantized_format.quantize(values)
    assert (rows.shape, rows.dtype) == ((*shape[:2], quantized_format.width), mx.uint32)
    dequantized = quantized_format.dequantize(rows)
    assert (dequantized.shape, dequantized.dtype) == (values.shape, dtype)
    dequantized, values = (np.array(x.astype(mx.float32)) for x in (dequantized, values))
    expected = dequantized_rows(
        np.array(rows), bits, quantized_format.group_size, dim, np.float16 if dtype == mx.float16 else np.float32
    )
    tolerance = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    assert np.abs(dequantized - expected).max() <= tolerance * np.abs(values).max()
    for start in range(0, dim, quantized_format.group_size):
        group, group_dequantized = (
            values[..., start : start + quantized_format.group_size],
            dequantized[..., start : start + quantized_format.group_size],
        )
        # A group's range includes 0, which is a multiple of its scale.
        span = np.maximum(group.max(-1), 0) - np.minimum(group.min(-1), 0)
        step = span / (2**bits - 1)
        assert (np.abs(group_dequantized - group).max(-1) <= 1.1 * step + tolerance * np.abs(values).max()).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_of_zeros_is_a_vector_of_zeros_and_a_constant_vector_stays_itself(bits):
    quantized_format = QuantizedFormat.choose(bits, 64, 48, mx.float32)
    assert not np.array(quantized_format.dequantize(mx.zeros((2, quantized_format.width), mx.uint32))).any()
    np.testing.assert_allclose(
        np.array(quantized_format.dequantize(quantized_format.quantize(mx.full((1, 48), 3.7)))), 3.7, rtol=1e-3
    )


@pytest.mark.parametrize(("bits", "group_size"), [(3, 64), (16, 64), (True, 64), (8, 16), (4, 0), (8, None)])
def test_other_bits_and_group_sizes_raise(bits, group_size):
    with pytest.raises(CacheError, match=r"kv_bits|kv_group_size"):
        QuantizedFormat.choose(bits, group_size, 64, mx.float32)


def test_a_quantized_pool_reads_what_was_stored_whatever_its_other_rows_hold():
    """Rows that no token attends to may be NaN when read as floats."""
    quantized_format = QuantizedFormat.choose(8, 32, 16, mx.float32)
    pool = QuantizedPool(mx.full((12, quantized_format.width), 2**32 - 1, mx.uint32), quantized_format)
    values = mx.array(np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32))
    index = CacheIndex.make([[0, 1, 2], [-1, 0, 1]], [[7, 3, 1, -1], [0, 11, -1, 5]])
    seen, new_pool = pool.extend(index, values)
    seen, expected = np.array(seen), np.array(quantized_format.dequantize(quantized_format.quantize(values)))
    assert np.array_equal(seen[0, :3], expected[0])
    assert np.array_equal(seen[1, :2], expected[1, 1:])
    assert not seen[0, 3:].any()
    assert not seen[1, 2:].any()
    assert (np.array(new_pool.rows) == 2**32 - 1).all(axis=1).sum() == 12 - 5
