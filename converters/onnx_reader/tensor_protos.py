"""Tensors of an ONNX file as lazy tensors: sizes are checked first, and data is read when it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import SparseTensorProto, TensorProto, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.external_data import external_data_reader
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES

# ONNX type -> bits of an element in raw data. Strings have no raw data.
ELEMENT_BITS = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 8),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 16),
    **dict.fromkeys(("int32", "uint32", "float32"), 32),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 64),
    **dict.fromkeys(("float6_e2m3", "float6_e3m2"), 6),
    **dict.fromkeys(("int4", "uint4", "float4_e2m1"), 4),
    **dict.fromkeys(("int2", "uint2"), 2),
    "float8_e8m0": 8,
    "complex128": 128,
}
# Integers that numpy has no type for; a LazyTensor reads each into a byte.
SUB_BYTE_INTEGERS = frozenset(name for name, bits in ELEMENT_BITS.items() if bits < 8 and "int" in name)
# Types that numpy has under ONNX's name.
_NUMPY_TYPES = frozenset(
    name
    for name, bits in ELEMENT_BITS.items()
    if name in ("float16", "float32", "float64", "bool") or ("int" in name and bits >= 8)
)
# Type -> the field of a TensorProto that holds its elements where they are no raw data; int32_data for the others.
_TYPED_FIELDS = {
    "string": "string_data",
    **dict.fromkeys(("float32", "complex64"), "float_data"),
    **dict.fromkeys(("float64", "complex128"), "double_data"),
    "int64": "int64_data",
    **dict.fromkeys(("uint32", "uint64"), "uint64_data"),
}
# Sizes are int32 in MLX; numpy has at most 64 axes.
AXIS_SIZE_LIMIT = 2**31
MAX_RANK = 32
MAX_ELEMENTS = 2**56
# numpy gives each text of an array the room of the longest: at most this many characters, and this many times those
# that the file has.
_TEXT_ALLOWANCE, _MAX_TEXT_FACTOR = 2**16, 16


def tensor_from_proto(proto: TensorProto, file: Path, name: str | None = None) -> LazyTensor:
    """Returns the tensor of a TensorProto in `file`, external data included, which is read later.

    name: for messages, where the tensor has none of its own. Raises ConvertError for a type or a shape that no tensor
    has, and for data of another size.
    """
    name = name or proto.name
    dtype = ELEMENT_TYPE_NAMES.get(proto.data_type)
    if dtype is None:
        raise ConvertError(
            file, f"the tensor {name!r} of type {proto.data_type}", f"one of {', '.join(ELEMENT_TYPE_NAMES.values())}"
        )
    shape = _checked_shape(proto.dims, file, name)
    if proto.data_location == TensorProto.EXTERNAL:
        return _external_tensor(proto, file, name, dtype, shape)
    if dtype != "string" and proto.HasField("raw_data"):
        byte_count = _byte_count(dtype, shape)
        if len(proto.raw_data) != byte_count:
            found = f"{len(proto.raw_data)} bytes of data for the tensor {name!r}"
            raise ConvertError(file, found, f"{byte_count} bytes")
    elif (count := _typed_element_count(proto, dtype)) != math.prod(shape):
        found = f"{count} elements for the tensor {name!r} of shape {list(shape)}"
        raise ConvertError(file, found, str(math.prod(shape)))
    if dtype == "string":
        return LazyTensor(dtype, shape, lambda: string_array([*proto.string_data], file, name).reshape(shape))
    return LazyTensor(dtype, shape, lambda: _array_from_proto(proto))


def string_array(values: str | bytes | Sequence[str | bytes], file: Path, name: str) -> np.ndarray:
    """Returns one text as a scalar array, a list of texts as an array of rank 1, bytes decoded as UTF-8.

    Raises ConvertError for texts that would take much more room in the array than in the file.
    """
    texts = [values] if isinstance(values, str | bytes) else values
    longest, total = max(map(len, texts), default=0), sum(map(len, texts))
    limit = _TEXT_ALLOWANCE + _MAX_TEXT_FACTOR * total
    if len(texts) * longest > limit:
        found = f"{len(texts)} texts of {total} bytes, the longest of {longest}, in the tensor {name!r}"
        expected = f"at most {limit} bytes for texts that all take the room of the longest"
        raise ConvertError(file, found, expected, "export the model without such long texts")
    decoded = [text.decode("utf-8", "replace") if isinstance(text, bytes) else text for text in texts]
    return np.array(decoded if texts is values else decoded[0], np.str_)


def tensor_from_sparse_proto(proto: SparseTensorProto, file: Path) -> LazyTensor:
    """Returns the dense tensor of a SparseTensorProto. Raises ConvertError for one of which hardly anything is set.

    Reading it raises ConvertError for indices outside its shape.
    """
    name = proto.values.name
    values, indices = tensor_from_proto(proto.values, file), tensor_from_proto(proto.indices, file)
    shape = _checked_shape(proto.dims, file, name)
    if math.prod(shape) > max(2**16, 256 * values.size):
        raise ConvertError(file, f"a sparse tensor of shape {list(shape)} with {values.size} values", "a smaller one")

    def read() -> np.ndarray:
        data, places = values.read(), indices.read()
        dense = np.zeros(shape, data.dtype)
        try:
            if places.ndim == 2:
                places = np.ravel_multi_index(tuple(places.T), shape)
            if places.size and not 0 <= places.min() <= places.max() < dense.size:
                raise ValueError(f"indices from {places.min()} to {places.max()}")
            dense.reshape(-1)[places] = data
        except (ValueError, IndexError, TypeError) as problem:
            raise ConvertError(
                file, f"the sparse tensor {name!r} ({problem})", "an index inside it for each value"
            ) from None
        return dense

    return LazyTensor(values.dtype, shape, read)


def _checked_shape(dims: Sequence[int], file: Path, name: str) -> tuple[int, ...]:
    found = f"the tensor {name!r} of shape {list(dims[:MAX_RANK])}"
    if len(dims) > MAX_RANK or any(not 0 <= size < AXIS_SIZE_LIMIT for size in dims):
        raise ConvertError(file, found, f"at most {MAX_RANK} sizes of 0 to {AXIS_SIZE_LIMIT - 1}")
    if math.prod(size or 1 for size in dims) > MAX_ELEMENTS:  # numpy counts the other sizes where one is 0
        raise ConvertError(file, found, f"sizes whose product, but for zeros, is at most {MAX_ELEMENTS}")
    return tuple(dims)


def _byte_count(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor's raw data."""
    return -(-math.prod(shape) * ELEMENT_BITS[dtype] // 8)


def _typed_element_count(proto: TensorProto, dtype: str) -> int:
    """The number of elements in the field of the tensor's type."""
    entries = len(getattr(proto, _TYPED_FIELDS.get(dtype, "int32_data")))
    if dtype in ("complex64", "complex128"):  # the real part and the imaginary part of an element are two entries
        return entries // 2
    if ELEMENT_BITS.get(dtype, 8) >= 8:
        return entries
    per_entry = 8 // ELEMENT_BITS[dtype]
    count = math.prod(proto.dims)
    # The last entry may be partly filled.
    return count if entries == math.ceil(count / per_entry) else entries * per_entry


def _array_from_proto(proto: TensorProto) -> np.ndarray:
    array = numpy_helper.to_array(proto)
    if array.dtype.name in SUB_BYTE_INTEGERS:
        return array.astype(np.uint8 if array.dtype.name.startswith("u") else np.int8)
    return array


def _external_tensor(proto: TensorProto, file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
    if dtype not in ELEMENT_BITS:
        raise ConvertError(
            file, f"external data of type {dtype} for the tensor {name!r}", "the texts in the file itself"
        )
    read_bytes = external_data_reader(proto, file, name, _byte_count(dtype, shape))

    def read() -> np.ndarray:
        if dtype in _NUMPY_TYPES:
            return np.frombuffer(read_bytes(), np.dtype(dtype)).reshape(shape)
        return _array_from_proto(TensorProto(data_type=proto.data_type, dims=shape, raw_data=bytes(read_bytes())))

    return LazyTensor(dtype, shape, read)
