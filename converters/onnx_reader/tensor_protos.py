"""Tensors of an ONNX file as lazy tensors: sizes are checked first, and data is read when it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.external_data import locate_external_data
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES

# Bits of one element as raw data holds it; strings have no raw data.
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


# Axes are int32 in MLX, and numpy has at most 64 of them.
AXIS_SIZE_LIMIT = 2**31
MAX_RANK = 32
MAX_ELEMENTS = 2**56


def tensor_from_proto(proto: TensorProto, file: Path, name: str | None = None) -> LazyTensor:
    """The Tensor of a TensorProto in `file`, external data included. Raises ConvertError for data that is not there
    whole.
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
        wanted = math.prod(shape) * ELEMENT_BITS[dtype] / 8
        if len(proto.raw_data) != math.ceil(wanted):
            raise ConvertError(
                file, f"{len(proto.raw_data)} bytes of data for the tensor {name!r}", f"{math.ceil(wanted)} bytes"
            )
    elif (count := _typed_element_count(proto, dtype)) != math.prod(shape):
        raise ConvertError(
            file, f"{count} elements for the tensor {name!r} of shape {list(shape)}", f"{math.prod(shape)}"
        )
    if dtype == "string":
        return LazyTensor(dtype, shape, lambda: string_array([*proto.string_data], file, name).reshape(shape))
    return LazyTensor(dtype, shape, lambda: _array_from_proto(proto))


def string_array(values: str | bytes | Sequence[str | bytes], file: Path, name: str) -> np.ndarray:
    """The texts as a numpy array, in which each takes the room of the longest. Raises ConvertError where that is much
    more than the file has.
    """
    found = [values] if isinstance(values, str | bytes) else values
    longest, whole = max(map(len, found), default=0), sum(map(len, found))
    if len(found) * longest > 2**16 + 16 * whole:
        what = f"{len(found)} texts of {whole} bytes, the longest of {longest}, in the tensor {name!r}"
        raise ConvertError(file, what, "texts of like lengths")
    plain = [text.decode("utf-8", "replace") if isinstance(text, bytes) else text for text in found]
    return np.array(plain, np.str_) if found is values else np.array(plain[0], np.str_)


def _checked_shape(dims: Sequence[int], file: Path, name: str) -> tuple[int, ...]:
    found = f"the tensor {name!r} of shape {list(dims[:MAX_RANK])}"
    if len(dims) > MAX_RANK or any(not 0 <= size < AXIS_SIZE_LIMIT for size in dims):
        raise ConvertError(file, found, f"at most {MAX_RANK} sizes of 0 to {AXIS_SIZE_LIMIT - 1}")
    if math.prod(size or 1 for size in dims) > MAX_ELEMENTS:  # numpy's limit, which a size of 0 doesn't lift
        raise ConvertError(file, found, f"sizes whose product, but for zeros, is at most {MAX_ELEMENTS}")
    return tuple(dims)


def _typed_element_count(proto: TensorProto, dtype: str) -> int:
    if dtype == "string":
        return len(proto.string_data)
    if dtype in ("float32", "complex64"):
        return len(proto.float_data) // (2 if dtype == "complex64" else 1)
    if dtype in ("float64", "complex128"):
        return len(proto.double_data) // (2 if dtype == "complex128" else 1)
    if dtype == "int64":
        return len(proto.int64_data)
    if dtype in ("uint32", "uint64"):
        return len(proto.uint64_data)
    packed = 8 // ELEMENT_BITS[dtype] if ELEMENT_BITS[dtype] < 8 else 1
    # Packed types hold several elements an entry; the last entry may be partly filled.
    count, wanted = len(proto.int32_data), math.prod(proto.dims)
    return wanted if count == math.ceil(wanted / packed) else count * packed


def _array_from_proto(proto: TensorProto) -> np.ndarray:
    array = numpy_helper.to_array(proto)
    if array.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return array.astype(np.uint8 if array.dtype.name.startswith("u") else np.int8)
    return array


def _external_tensor(proto: TensorProto, file: Path, name: str, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    path = locate_external_data(location, file, name)
    try:
        offset = int(entries.get("offset") or 0)
        wanted = math.ceil(math.prod(shape) * ELEMENT_BITS[dtype] / 8)
        length = int(entries.get("length") or wanted)
    except (ValueError, KeyError):
        raise ConvertError(
            file, f"external data {entries!r} of the tensor {name!r}", "a location, an offset, a length"
        ) from None
    size = path.stat().st_size
    if length != wanted or offset < 0 or offset + length > size:
        raise ConvertError(
            file,
            f"the tensor {name!r} at bytes {offset} to {offset + length} of {location!r}, which has {size} bytes",
            f"{wanted} bytes of data inside that file",
            "download the file again, whole",
        )

    def read() -> np.ndarray:
        if not wanted:
            data = b""
        else:
            data = np.memmap(path, np.uint8, "r", offset, wanted)
        plain = (
            np.dtype(dtype)
            if dtype in ("float16", "float32", "float64", "bool") or ("int" in dtype and ELEMENT_BITS[dtype] >= 8)
            else None
        )
        if plain is not None:
            return np.frombuffer(data, plain).reshape(shape)
        return _array_from_proto(TensorProto(data_type=proto.data_type, dims=shape, raw_data=bytes(data)))

    return LazyTensor(dtype, shape, read)


def tensor_from_sparse_proto(proto: onnx.SparseTensorProto, file: Path) -> LazyTensor:
    """The dense Tensor of a SparseTensorProto."""
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
