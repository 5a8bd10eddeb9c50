"""to_bits and from_bits against struct. Run as a script, this file goes through all 2³² patterns."""

from __future__ import annotations

import math
import struct

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.generation import GenerationError, from_bits, to_bits

INT32 = st.integers(-(2**31), 2**31 - 1)
EDGES = [0, -(2**31), 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, -0x00800000, -1]
NAN_BITS = 0x7FC00000


def is_nan(bits: int) -> bool:
    return bits & 0x7F800000 == 0x7F800000 and bits & 0x007FFFFF != 0


@given(INT32)
def test_a_float_equals_the_one_that_struct_reads(bits):
    value = from_bits(bits)
    assert type(value) is float
    if is_nan(bits):
        assert math.isnan(value)
        assert to_bits(value) == NAN_BITS
    else:
        assert struct.pack("<f", value) == struct.pack("<i", bits)
        assert to_bits(value) == bits


def test_edges_signs_and_the_signs_of_zero_survive():
    assert [to_bits(from_bits(bits)) for bits in EDGES if not is_nan(bits)] == [b for b in EDGES if not is_nan(b)]
    assert from_bits(0x7F800000) == math.inf
    assert from_bits(-0x00800000) == -math.inf
    assert math.copysign(1, from_bits(-(2**31))) == -1


def test_a_float64_is_rounded_to_the_nearest_float32():
    assert to_bits(0.1) == struct.unpack("<i", struct.pack("<f", 0.1))[0]
    assert from_bits(to_bits(1e300)) == math.inf


@given(st.lists(INT32, max_size=20))
def test_a_list_gives_the_value_of_each_element(bits):
    assert to_bits(from_bits(bits)) == [NAN_BITS if is_nan(b) else b for b in bits]


def test_arrays_and_nested_lists_give_lists():
    assert from_bits(mx.array([[0, 0x3F800000]])) == [[0.0, 1.0]]
    assert to_bits(np.array([1.0, np.nan])) == [0x3F800000, NAN_BITS]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 1.0, [0, 2**40], "0"])
def test_what_is_no_signed_32_bit_integer_is_an_error(wrong):
    with pytest.raises(GenerationError, match="32-bit"):
        from_bits(wrong)


if __name__ == "__main__":
    block = 2**20
    for start in range(-(2**31), 2**31, block):
        patterns = np.arange(start, start + block, dtype=np.int64)
        with np.errstate(invalid="ignore"):
            nan = np.isnan(patterns.astype(np.int32).view(np.float32))
        found = np.array(to_bits(from_bits(patterns)))
        assert (found == np.where(nan, NAN_BITS, patterns)).all(), hex(start & 0xFFFFFFFF)
    print("all 2³² patterns are exact")
