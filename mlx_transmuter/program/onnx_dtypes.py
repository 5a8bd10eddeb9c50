"""The names of ONNX's tensor types, which values keep in a program; ops/types.py says what MLX has for them."""

from __future__ import annotations

ONNX_DTYPES = frozenset(
    {
        *("float32", "float16", "bfloat16", "float64", "complex64", "complex128", "bool", "string"),
        *("int64", "int32", "int16", "int8", "int4", "int2", "uint64", "uint32", "uint16", "uint8", "uint4", "uint2"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0"),
        *("float6_e2m3", "float6_e3m2", "float4_e2m1"),
        "cache_index",  # no tensor: an input that is a CacheIndex
    }
)
