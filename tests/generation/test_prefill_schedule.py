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


@given(st.integers(1, 5000), st.one_of(st.none(), st.integers(1, 600)))
def test_chunks_are_descending_powers_of_two_that_add_up(length, most):
    parts = prefill_chunks(length, most)
    assert sum(parts) == length
    assert all(part & (part - 1) == 0 and part <= (most or length) for part in parts)
    assert parts == sorted(parts, reverse=True)
