"""Types: what MLX holds of each ONNX tensor type, and the passage of host arrays to the device.

Nothing on a device is wider than 32 bits: ONNX's int64 is int32 there, its double float32 (Metal has no float64 and no
scatter of 8-byte types). Values out of range are clamped, so the INT64_MAX that exporters write for "to the end" keeps
its meaning.
"""

import mlx.core as mx
import numpy as np

# ONNX TensorProto.DataType -> (the type's name, what the device holds of it)
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


def device_dtype(type_name: str) -> mx.Dtype:
    """What a device holds of the ONNX type `name`. Raises ValueError for a type that MLX has no form of."""
    dtype = ELEMENT_TYPES[ELEMENT_TYPE_CODES[type_name]][1]
    if dtype is None:
        raise ValueError(f"found a tensor of type {type_name}; MLX has no such type")
    return dtype


def to_device(array: np.ndarray) -> mx.array:
    """The host array as an `mx.array` no wider than 32 bits; integers out of range are clamped to the range."""
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
    """The array's values as numpy; bfloat16, which numpy lacks, comes as float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
