"""Casts: ONNX's rules, saturation of 32-bit integers, 4-bit integers, half precision, bit casts."""

import numpy as np
import pytest
from numpy_node import assert_node_gives, run_node

from mlx_transmuter.ops import ELEMENT_TYPE_CODES, OperatorError

INT32 = np.iinfo(np.int32)


@pytest.mark.parametrize("to", ["int32", "int64"])
def test_floats_are_truncated_and_saturated_to_integers(to):
    x = np.array(
        [-np.inf, -3e9, -2147483648, -1.9, -0.5, 0.5, 1.9, 16777217, 2147483520, 2147483648, np.inf], np.float32
    )
    exact = np.trunc(np.clip(x.astype(np.float64), INT32.min, INT32.max)).astype(np.int32)
    assert_node_gives("Cast", [x], exact, {"to": ELEMENT_TYPE_CODES[to]})


@pytest.mark.parametrize("to", ["uint8", "int8", "int16", "uint16", "uint32"])
def test_integers_keep_their_low_bits(to):
    x = np.array([INT32.min, -129, -1, 0, 1, 200, 300, 70000, INT32.max], np.int32)
    assert_node_gives("Cast", [x], x.astype(to), {"to": ELEMENT_TYPE_CODES[to]})


def test_casts_to_bool():
    x = np.array([0.0, -0.0, 0.1, -3, np.nan, np.inf], np.float32)
    assert_node_gives("Cast", [x], x.astype(bool), {"to": ELEMENT_TYPE_CODES["bool"]})
    for to in ("float32", "float16", "int32", "uint8"):
        assert_node_gives("Cast", [np.array([True, False])], np.array([1, 0], to), {"to": ELEMENT_TYPE_CODES[to]})


def test_casts_to_half_precision_overflow_to_infinity():
    x = np.array([65504, 65519, 65520, -1e6, 1e-8], np.float32)
    with np.errstate(over="ignore"):
        assert_node_gives("Cast", [x], x.astype(np.float16), {"to": ELEMENT_TYPE_CODES["float16"]})


@pytest.mark.parametrize(("to", "bits", "signed"), [("int4", 4, True), ("uint4", 4, False), ("int2", 2, True)])
def test_narrow_integers_wrap(to, bits, signed):
    x = np.arange(-9, 9, dtype=np.float32)
    low = x.astype(int) % 2**bits
    expected = np.where(low >= 2 ** (bits - 1), low - 2**bits, low) if signed else low
    assert_node_gives(
        "Cast", [x], expected.astype(np.int8 if signed else np.uint8), {"to": ELEMENT_TYPE_CODES[to]}, opset=25
    )


def test_cast_like():
    x = np.array([1.5, -2.5], np.float32)
    assert_node_gives("CastLike", [x, np.zeros(3, np.int32)], np.array([1, -2], np.int32))
    assert_node_gives("CastLike", [x, np.zeros((), np.float16)], x.astype(np.float16))


def test_bit_cast():
    x = np.array([1.0, -0.0, np.inf], np.float32)
    assert_node_gives("BitCast", [x], x.view(np.int32), {"to": ELEMENT_TYPE_CODES["int32"]}, opset=26)
    assert_node_gives(
        "BitCast",
        [x.astype(np.float16)],
        x.astype(np.float16).view(np.uint16),
        {"to": ELEMENT_TYPE_CODES["uint16"]},
        opset=26,
    )
    for to in ("int64", "float64", "float16"):
        with pytest.raises(OperatorError, match="types of one width, at most 32 bits"):
            run_node("BitCast", [x], {"to": ELEMENT_TYPE_CODES[to]}, opset=26)


def test_casts_to_types_without_a_device_type_raise():
    for to in ("string", "float8_e4m3fn"):
        with pytest.raises(OperatorError, match=f"a tensor of type {to}"):
            run_node("Cast", [np.zeros(2, np.float32)], {"to": ELEMENT_TYPE_CODES[to]})
