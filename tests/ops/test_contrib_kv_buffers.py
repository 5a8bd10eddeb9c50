"""Writes into buffers of keys and values against numpy, and their memory."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.ops.contrib.kv_buffers import value_if_known, write_to_buffer


@settings(max_examples=60)
@given(st.data())
def test_each_row_is_written_from_its_own_start(data):
    batch, seq, length = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 4), (0, 9)))
    capacity = data.draw(st.integers(max(length, seq), 12))
    starts = [data.draw(st.integers(0, capacity - seq)) for _ in range(batch)]
    rng = np.random.default_rng(batch + 7 * seq)
    past, rows = rng.normal(size=(batch, 2, length, 3)), rng.normal(size=(batch, 2, seq, 3))
    expected = np.zeros((batch, 2, capacity, 3), dtype=np.float32)
    expected[:, :, :length] = past
    for row, start in enumerate(starts):
        expected[row, :, start : start + seq] = rows[row]
    given_past = mx.array(past.astype(np.float32))
    actual = write_to_buffer(given_past, mx.array(rows.astype(np.float32)), mx.array(starts, dtype=mx.int32), capacity)
    if capacity > seq or length:  # else the rows are the whole buffer, wherever they start
        np.testing.assert_array_equal(np.array(actual), expected)
    np.testing.assert_array_equal(np.array(given_past), past.astype(np.float32))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_write_allocates_no_memory_of_the_size_of_the_buffer(batch):
    """A buffer without another reference is written in place, whatever its length."""
    held = [mx.zeros((batch, 2, 2**15, 16))]
    rows, starts = mx.ones((batch, 2, 2, 16)), mx.array([5] * batch)
    mx.eval(held, rows, starts)
    size = held[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    new = write_to_buffer(held.pop(), rows, starts, 2**15)
    mx.eval(new)
    assert mx.get_peak_memory() - before < size / 100
    assert np.array(new[:, :, 4:8, 0]).tolist() == [[[0, 1, 1, 0]] * 2] * batch


@pytest.mark.usefixtures("compiling")
def test_a_number_is_known_unless_the_step_computes_it():
    values = []

    def step(number):
        values.append((value_if_known(number, -1), value_if_known(mx.array(7), -1), value_if_known(None, -1)))
        return number

    mx.compile(step)(mx.array(5))
    step(mx.array(5))
    assert values == [(-1, 7, -1), (5, 7, -1)]
