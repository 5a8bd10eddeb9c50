"""Layout: rows of pools, contiguous slots and those of blocks, and columns of rings, in Python, numpy and MLX alike."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.cache import layout

CONVERSIONS = {"numpy": np.asarray, "MLX": lambda numbers: mx.array(np.asarray(numbers, np.int32))}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@given(num_heads=st.integers(1, 4), head_span=st.integers(1, 5), spans=st.integers(1, 4))
def test_each_slot_and_head_has_one_row_of_the_pool(convert, num_heads, head_span, spans):
    num_slots = head_span * spans
    slots, heads = np.arange(num_slots), np.arange(num_heads)[:, None]
    rows = np.array(layout.pool_rows(convert(slots), convert(heads), num_heads, head_span))
    order = [(start, h, i) for start in range(spans) for h in range(num_heads) for i in range(head_span)]
    expected = {(h, start * head_span + i): row for row, (start, h, i) in enumerate(order)}
    assert {(h, slot): rows[h, slot] for h in range(num_heads) for slot in range(num_slots)} == expected
    assert layout.pool_rows(num_slots - 1, num_heads - 1, num_heads, head_span) == rows[-1, -1]
    size = layout.pool_size(num_slots, num_heads)
    assert layout.spare_pool_row(size) == rows.size == rows.max() + 1 == size - 1


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@given(width=st.integers(1, 6), newest=st.integers(-1, 20))
def test_a_column_of_a_ring_has_the_last_position_with_that_column(convert, width, newest):
    columns = np.arange(width)
    positions = np.array(layout.ring_position(convert(columns), newest, width))
    for column, position in enumerate(positions.tolist()):
        own = [p for p in range(newest + 1) if layout.ring_column(p, width) == column]
        assert position == own[-1] if own else position < 0
    assert np.array_equal(np.array(layout.ring_column(convert(positions), width)), columns)


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3), width=st.integers(1, 8), stride=st.integers(1, 9))
def test_a_table_of_contiguous_slots_has_the_slot_of_each_position(lengths, width, stride):
    table = layout.contiguous_table_of_lengths(np.array(lengths), width, stride)
    ring = layout.contiguous_table_of_lengths(np.array(lengths), width, stride, ring=True)
    assert table.dtype == ring.dtype == np.int32
    for row, length in enumerate(lengths):
        expected, expected_ring = [-1] * width, [-1] * width
        for position in range(min(length, stride)):
            if position < width:
                expected[position] = layout.contiguous_slots(row, position, stride)
            if position >= length - width:
                expected_ring[layout.ring_column(position, width)] = layout.contiguous_slots(row, position, stride)
        assert table[row].tolist() == expected
        assert ring[row].tolist() == expected_ring
    assert layout.contiguous_table(len(lengths), stride).reshape(-1).tolist() == list(range(len(lengths) * stride))


@given(blocks=st.lists(st.integers(0, 9), max_size=4), block_size=st.integers(1, 4))
def test_the_slots_of_blocks_are_consecutive_within_each_block(blocks, block_size):
    slots = layout.slots_of_blocks(blocks, block_size)
    assert slots.dtype == np.int32
    assert slots.tolist() == [block * block_size + i for block in blocks for i in range(block_size)]


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_in_range_and_is_column_agree(convert):
    numbers = [-(2**31), -1, 0, 1, 4, 5, 6, 2**31 - 1]
    expected = [False, False, True, True, True, False, False, False]
    assert np.array(layout.in_range(convert(numbers), 5)).tolist() == expected
    assert layout.is_column(mx.array(numbers), 5).tolist() == expected
    assert [layout.in_range(number, 5) for number in numbers] == expected
    assert layout.clip_columns(mx.array(numbers), 5).tolist() == [0, 0, 0, 1, 4, 4, 4, 4]
