"""Tensors of an ONNX file: their sizes are checked before anything is read, and their data is read only when it is
used.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES, to_device

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


# The float types that weights of a layer may have.
LAYER_FLOAT_TYPES = ("float32", "float16", "bfloat16")
# Axes are int32 in MLX, and numpy has at most 64 of them.
AXIS_SIZE_LIMIT = 2**31
MAX_RANK = 32
MAX_ELEMENTS = 2**56


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose data is read when asked for, so that a conversion holds one weight more than the file, not all
    twice.

    dtype: the ONNX type's name. shape: its shape. read: gives the data as a numpy array of that shape (bfloat16 and the
    like as ml_dtypes has them; 4-bit integers one a byte). holds: the tensors that this one was made of, each with a
    view of it in this one's array.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    components: tuple[tuple[LazyTensor, Callable[[mx.array], mx.array]], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_device(self) -> mx.array:
        """The data as an `mx.array`, read now."""
        return to_device(np.ascontiguousarray(self.read()).reshape(self.shape))

    def transpose(self) -> LazyTensor:
        """The tensor with its axes in reverse order."""
        return self.permute_axes(tuple(range(len(self.shape)))[::-1])

    def permute_axes(self, axes: tuple[int, ...]) -> LazyTensor:
        """The tensor with its axes in another order, one that undoes itself."""
        shape = tuple(self.shape[axis] for axis in axes)
        return LazyTensor(
            self.dtype, shape, lambda: self.read().transpose(axes), ((self, lambda a: a.transpose(axes)),)
        )


def concatenate_tensors(tensors: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """The tensors one after the other along the axis."""
    sizes = [one.shape[axis] for one in tensors]
    ends = itertools.accumulate(sizes)
    rows = [(*[slice(None)] * axis, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    holds = tuple((one, operator.itemgetter(part)) for one, part in zip(tensors, rows, strict=True))
    shape = (*tensors[0].shape[:axis], sum(sizes), *tensors[0].shape[axis + 1 :])
    return LazyTensor(tensors[0].dtype, shape, lambda: np.concatenate([one.read() for one in tensors], axis), holds)


def stack_tensors(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """The tensors side by side along a new first axis."""
    holds = tuple((one, operator.itemgetter(i)) for i, one in enumerate(tensors))
    shape = (len(tensors), *tensors[0].shape)
    return LazyTensor(tensors[0].dtype, shape, lambda: np.stack([one.read() for one in tensors]), holds)


def shared_readers(compute: Callable[[], tuple[mx.array, ...]], count: int) -> list[Callable[[], np.ndarray]]:
    """A function for each of the arrays that `make` gives. It runs once where they are asked for one after the other;
    what nobody has asked for yet is all that is kept of it.
    """
    left: dict[int, mx.array] = {}

    def part(at: int) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            if at not in left:
                left.update(enumerate(compute()))
                mx.eval(list(left.values()))
            return np.array(left.pop(at))

        return read

    return [part(at) for at in range(count)]


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


def locate_external_data(location: str, file: Path, name: str) -> Path:
    """The path of external data. Raises ConvertError unless it lies in the folder of `file`.

    The one link that is followed out of the folder is that of a Hugging Face snapshot, whose files all point into the
    repository's own `blobs`: `models--x/snapshots/<commit>/…` to `models--x/blobs/<hash>`.
    """
    wrong = ConvertError(
        file,
        f"external data at {location!r} for the tensor {name!r}",
        "a file beside the model",
        "do not trust this model",
    )
    parts = Path(location).parts
    if (
        not location
        or "\0" in location
        or Path(location).is_absolute()
        or ".." in parts
        or ":" in location
        or "\\" in location
    ):
        raise wrong
    folder = Path(os.path.realpath(file.parent))
    real = Path(os.path.realpath(folder / location))
    if not (real.is_relative_to(folder) or real.parent in _snapshot_blobs(folder)):
        raise wrong
    try:
        real.stat()
    except OSError as problem:
        found = f"no file {location!r}, which holds the tensor {name!r} ({problem.strerror})"
        raise ConvertError(file, found, "it beside the model", "download it too") from None
    if not real.is_file():
        raise wrong
    return real


def _snapshot_blobs(folder: Path) -> list[Path]:
    """The blobs of the repository in whose snapshot the real path `folder` lies, if it lies in one."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    blobs = snapshots.parent / "blobs" if snapshots else None
    return [blobs] if blobs and blobs.is_dir() and not blobs.is_symlink() else []


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
