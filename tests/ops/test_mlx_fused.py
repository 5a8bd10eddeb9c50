"""Fused operators against NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.ops import OPERATORS

rotary = OPERATORS["mlx.rotary"].function


@pytest.mark.parametrize("interleaved", [0, 1])
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    seq=st.integers(1, 4),
    half=st.integers(1, 5),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotary_multiplies_pairs_as_complex_numbers(interleaved, rows, heads, seq, half, turned, seed):
    """turned: whether the heads are after the positions, [rows, seq, heads, dim]."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, heads, seq, 2 * half)).astype(np.float32)
    angles = draw.normal(size=(rows, 1, seq, half)).astype(np.float32)
    pairs = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * angles)
    parts = [pairs.real, pairs.imag]
    expected = np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)
    tables = np.repeat(angles, 2, -1) if interleaved else np.concatenate([angles, angles], -1)
    if turned:
        x, tables, expected = (array.swapaxes(1, 2) for array in (x, tables, expected))
    actual = rotary(*(mx.array(array) for array in (x, np.cos(tables), np.sin(tables))), interleaved=interleaved)
    np.testing.assert_allclose(np.array(actual), expected, atol=1e-5)
