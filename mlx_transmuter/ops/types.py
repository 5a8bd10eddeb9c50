"""Element types: the MLX type of each ONNX tensor type, and copies of arrays from host to device and back.

Nothing on a device is wider than 32 bits: ONNX's int64 is int32 there, its double float32 (Metal has no float64 and no
scatter of 8-byte types). Values out of range become the nearest in range, so the INT64_MAX that exporters write for "to
the end" keeps its meaning.
"""

import mlx.core as mx
import numpy as np

from mlx_transmuter.ops.registry import OperatorError

# ONNX TensorProto.DataType -> (the type's name, its MLX type on the device)
ELEMENT_TYPES: dict[int, tuple[str, mx.Dtype | None]] = {
    1: ("float32", mx.float32),
    2: ("uint8", mx.uint8),
    3: ("int8", mx.int8),
    4: ("uint16", mx.uint16),
    5: ("int16", mx.int16),
    6: ("int32", mx.int32),
    7: ("int64", mx.int32),
    8: ("string", None),
    9: ("bool", mx.bool_),
    10: ("float16", mx.float16),
    11: ("float64", mx.float32),
    12: ("uint32", mx.uint32),
    13: ("uint64", mx.uint32),
    14: ("complex64", mx.complex64),
    15: ("complex128", mx.complex64),
    16: ("bfloat16", mx.bfloat16),
    17: ("float8_e4m3fn", None),
    18: ("float8_e4m3fnuz", None),
    19: ("float8_e5m2", None),
    20: ("float8_e5m2fnuz", None),
    21: ("uint4", mx.uint8),
    22: ("int4", mx.int8),
    23: ("float4_e2m1", None),
    24: ("float8_e8m0", None),
    25: ("uint2", mx.uint8),
    26: ("int2", mx.int8),
    27: ("float6_e2m3", None),
    28: ("float6_e3m2", None),
}
ELEMENT_TYPE_NAMES = {code: name for code, (name, _) in ELEMENT_TYPES.items()}
ELEMENT_TYPE_CODES = {name: code for code, name in ELEMENT_TYPE_NAMES.items()}

_DEVICE_INTEGERS = {"int64": np.int32, "uint64": np.uint32}


def device_dtype(element_type: str | int) -> mx.Dtype:
    """Returns the MLX type of an ONNX type on a device, given by its name or its code (a TensorProto.DataType).

    Raises OperatorError for a type that is unknown or that MLX has no type for.
    """
    code = ELEMENT_TYPE_CODES.get(element_type, 0) if isinstance(element_type, str) else element_type
    name, dtype = ELEMENT_TYPES.get(code, (element_type, None))
    if dtype is None:
        raise OperatorError(f"a tensor of type {name}", "a type that MLX has")
    return dtype


def to_device(array: np.ndarray) -> mx.array:
    """Returns the host array as an `mx.array` of at most 32 bits; integers out of range become the nearest in range."""
    array = np.asarray(array, order="C")  # MLX takes no negative strides
    narrow = _DEVICE_INTEGERS.get(array.dtype.name)
    if narrow is not None:
        limits = np.iinfo(narrow)
        array = np.clip(array, limits.min, limits.max).astype(narrow)
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    elif array.dtype == np.complex128:
        array = array.astype(np.complex64)
    elif array.dtype.name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def to_host(array: mx.array) -> np.ndarray:
    """Returns the array's values as numpy; bfloat16, which numpy lacks, becomes float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
