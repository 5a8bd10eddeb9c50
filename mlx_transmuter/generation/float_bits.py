"""float32 values as the signed 32-bit integers of their bits, the form in which a step returns its scores."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.errors import GenerationError

QUIET_NAN = 0x7FC00000


def to_bits(value: Any) -> Any:
    """Returns the bits of value in float32 as an int; a list, nested or not, or an array gives a list. NaN is
    QUIET_NAN."""
    with np.errstate(over="ignore"):
        values = np.asarray(value, dtype=np.float32)
    return np.where(np.isnan(values), np.int32(QUIET_NAN), values.view(np.int32)).tolist()


def array_to_bits(values: mx.array) -> mx.array:
    """Returns the bits of float32 values as int32, on the device; as `to_bits` for NaN."""
    return mx.where(mx.isnan(values), QUIET_NAN, values.view(mx.int32))


def from_bits(bits: Any) -> Any:
    """Returns the float, which may be NaN or infinite, of the float32 bits `bits`; a list or an array gives a list.

    Raises GenerationError for a value that is no signed 32-bit integer.
    """
    values = np.asarray(bits)
    if values.size and (values.dtype.kind not in "iu" or values.min() < -(2**31) or values.max() >= 2**31):
        raise GenerationError("from_bits", repr(bits), "signed 32-bit integers")
    return values.astype(np.int32).view(np.float32).tolist()
