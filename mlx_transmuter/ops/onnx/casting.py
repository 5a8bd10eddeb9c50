"""Types of elements: casts, and the reading of bits as another type."""

import mlx.core as mx

from mlx_transmuter.ops.integer_ranges import same_range
from mlx_transmuter.ops.registry import OperatorError, op
from mlx_transmuter.ops.types import ELEMENT_TYPE_CODES, ELEMENT_TYPE_NAMES, device_dtype


def saturating_cast(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """Returns x as `dtype`. Floats are truncated to integers; out of a 32-bit range they become the nearest in it."""
    if not (mx.issubdtype(x.dtype, mx.floating) and mx.issubdtype(dtype, mx.integer)):
        return x.astype(dtype)
    if dtype.size < 4:
        return x.astype(mx.int32).astype(dtype)
    limits = mx.iinfo(dtype)
    x = x.astype(mx.float32)
    truncated = mx.where(x < float(limits.max), x, 0).astype(dtype)
    return mx.where(x >= float(limits.max), limits.max, mx.where(x <= float(limits.min), limits.min, truncated)).astype(
        dtype
    )


# Types narrower than a byte, which have one value per byte: code -> (bits, signed).
_SUB_BYTE_TYPES = {
    ELEMENT_TYPE_CODES["int4"]: (4, True),
    ELEMENT_TYPE_CODES["uint4"]: (4, False),
    ELEMENT_TYPE_CODES["int2"]: (2, True),
    ELEMENT_TYPE_CODES["uint2"]: (2, False),
}
# Types of which a device holds another, narrower one.
_TYPES_NARROWED_ON_DEVICE = {ELEMENT_TYPE_CODES[name] for name in ("int64", "uint64", "float64", "complex128")}


@op("Cast-9", integer_range=same_range)
def cast(x, *, to, saturate=1, round_mode="up"):
    """x as the ONNX type `to`. `saturate` and `round_mode` concern 8-bit floats.

    ONNX Cast-9, 13, 19, 21, 23, 24, 25, 28.
    """
    result = saturating_cast(x, device_dtype(to))
    if to in _SUB_BYTE_TYPES:
        bits, signed = _SUB_BYTE_TYPES[to]
        half, ones = 1 << (bits - 1), (1 << bits) - 1
        result = result & ones
        result = (mx.bitwise_xor(result, half) - half if signed else result).astype(device_dtype(to))
    return result


@op("CastLike-15", integer_range=same_range)
def cast_like(x, like, *, saturate=1, round_mode="up"):
    """x as the type of `like`. ONNX CastLike-15, 19, 21, 23, 24, 25."""
    return saturating_cast(x, like.dtype)


@op("BitCast-26")
def bit_cast(x, *, to):
    """The bits of x read as the ONNX type `to` of the same width, at most 32 bits. ONNX BitCast-26."""
    if to in _TYPES_NARROWED_ON_DEVICE or device_dtype(to).size != x.dtype.size:
        raise OperatorError(
            f"bits of {x.dtype} as {ELEMENT_TYPE_NAMES.get(to, to)}", "types of one width, at most 32 bits"
        )
    return x.view(device_dtype(to))
