"""The safetensors of a converted folder: one file, or shards with an index in the form of `huggingface_hub` and MLX."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_transmuter.folder_format import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from mlx_transmuter.git_lfs import check_not_lfs_pointer
from mlx_transmuter.program import Program, ProgramError

MAX_SHARD_BYTES = 5 * 2**30
_SAFETENSORS_DTYPES = {
    mx.bool_: "BOOL",
    mx.int8: "I8",
    mx.uint8: "U8",
    mx.int16: "I16",
    mx.uint16: "U16",
    mx.int32: "I32",
    mx.uint32: "U32",
    mx.int64: "I64",
    mx.uint64: "U64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.complex64: "C64",
}


class StoredWeight(NamedTuple):
    """A weight to write. rows: yields its elements in their order, in arrays of its dtype and of any shapes."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[mx.array]]

    @staticmethod
    def of_array(name: str, array: mx.array) -> StoredWeight:
        """Returns the weight with the elements of an array."""
        return StoredWeight(name, array.dtype, tuple(array.shape), lambda: [array])

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.size


def save(folder: Path, stored: Iterable[StoredWeight], shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes the weights to `folder`, in their order and one array at a time. An empty program has an empty file."""
    shards: list[list[StoredWeight]] = [[]]
    filled = 0
    for weight in stored:
        if shards[-1] and filled + weight.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += weight.nbytes
    names = (
        [WEIGHTS_FILE]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for file, shard in zip(names, shards, strict=True):
        _write_shard(folder / file, shard)
    if len(shards) > 1:
        total = sum(weight.nbytes for shard in shards for weight in shard)
        file_of_weight = {weight.name: file for file, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": {"total_size": total}, "weight_map": file_of_weight}
        (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _write_shard(path: Path, stored: Sequence[StoredWeight]) -> None:
    """Writes a file of safetensors. Larger elements come first in it, so that each array is aligned."""
    header: dict[str, dict] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for weight in sorted(stored, key=lambda weight: -weight.dtype.size):
        begin, end = end, end + weight.nbytes
        dtype = _SAFETENSORS_DTYPES[weight.dtype]
        header[weight.name] = {"dtype": dtype, "shape": weight.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in stored:
            begin, end = (8 + len(text) + offset for offset in header[weight.name]["data_offsets"])
            file.seek(begin)
            for rows in weight.rows():
                assert rows.dtype == weight.dtype, f"rows of {rows.dtype} of {weight.name}"
                elements: Any = mx.contiguous(rows).reshape(-1).view(mx.uint8)
                file.write(memoryview(elements))
            assert file.tell() == end, f"{file.tell() - begin} bytes of {weight.name}"


def write_safetensors(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Writes a file whose name ends with .safetensors.

    Raises OSError with the system's reason, which MLX leaves out of its RuntimeError.
    """
    try:
        mx.save_safetensors(str(path), arrays, metadata=metadata)
    except RuntimeError as error:
        if not str(error).startswith(("[write]", "[save_safetensors]")):
            raise
        with open(path, "ab") as file:
            file.write(bytes(2**20))  # what MLX could not write, this cannot either
        raise OSError(errno.EIO, str(error), str(path)) from error


def load(folder: Path, program: Program) -> dict[str, mx.array]:
    """Returns the arrays of the program's weights, read when used. Raises ProgramError for a missing or broken file."""
    if (folder / WEIGHTS_INDEX_FILE).exists():
        try:
            file_of_weight = json.loads((folder / WEIGHTS_INDEX_FILE).read_bytes())["weight_map"]
            files = sorted({str(file_of_weight[name]) for name in program.weights})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProgramError(
                str(folder / WEIGHTS_INDEX_FILE), f"no index ({error})", "the file of every weight"
            ) from None
    else:
        files = [WEIGHTS_FILE]
    arrays: dict[str, mx.array] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ProgramError(str(folder), f"no file {file!r}", "the model's safetensors beside program.json")
        check_not_lfs_pointer(folder / file, ProgramError)
        try:
            arrays |= mx.load(str(folder / file), format="safetensors")  # type: ignore[arg-type]
        except (RuntimeError, ValueError) as error:
            raise ProgramError(str(folder / file), f"no safetensors ({error})", "the weights as saved") from None
    return arrays
