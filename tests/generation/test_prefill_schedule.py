"""The chunks in which a prompt runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.runtime.prefill_schedule import prefill_chunks


def test_a_prompt_of_45_runs_as_32_8_4_and_1():
    assert prefill_chunks(45) == [32, 8, 4, 1]
    assert prefill_chunks(45, 16) == [16, 16, 8, 4, 1]
    assert prefill_chunks(45, 20) == [16, 16, 8, 4, 1]
    assert prefill_chunks(3, 1) == [1, 1, 1]
    assert prefill_chunks(0) == []


def test_where_padding_costs_nothing_the_last_chunk_has_some():
    assert prefill_chunks(31, padded=True) == [32]
    assert prefill_chunks(45, padded=True) == [64]
    assert prefill_chunks(45, 32, padded=True) == [32, 16]
    assert prefill_chunks(1100, padded=True) == [1024, 128]
    assert prefill_chunks(700, padded=True) == [512, 256]
    assert prefill_chunks(45, 20, padded=True) == [16, 16, 16]
    assert prefill_chunks(45, prompt_mode="whole", padded=True) == [45]


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 600)))
def test_chunks_are_descending_powers_of_two_that_add_up(length, most):
    parts = prefill_chunks(length, most)
    assert sum(parts) == length
    assert all(part & (part - 1) == 0 and part <= (most or length) for part in parts)
    assert parts == sorted(parts, reverse=True)


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 600)))
def test_padded_chunks_are_of_the_same_sizes_and_hold_the_prompt(length, most):
    plain, padded = prefill_chunks(length, most), prefill_chunks(length, most, padded=True)
    assert length <= sum(padded) <= length + 255
    assert len(padded) <= len(plain)
    assert all(part & (part - 1) == 0 and part <= (most or 2 * length) for part in padded)
    assert sum(padded[:-1]) < length
