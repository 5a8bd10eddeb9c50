"""External data of an ONNX file: the files and the bytes that its tensors may name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import TensorProto

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.folder_format import leaves_folder
from mlx_transmuter.git_lfs import check_not_lfs_pointer


def external_data_reader(
    proto: TensorProto, file: Path, name: str, byte_count: int
) -> Callable[[], bytes | np.ndarray]:
    """Returns the function that reads the `byte_count` bytes of a tensor: b"" for none, else a memory-mapped array.

    file: the ONNX file. name: the tensor's, for messages. Raises ConvertError for data that is not inside a file in the
    folder of the ONNX file.
    """
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    # Data in the ONNX file itself: see inline_data.py.
    path = file if location == file.name else locate_external_data(location, file, name)
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or byte_count)
    except ValueError:
        raise ConvertError(
            file, f"external data {entries!r} of the tensor {name!r}", "a location, an offset, a length"
        ) from None
    size = path.stat().st_size
    if length != byte_count or offset < 0 or offset + length > size:
        raise ConvertError(
            file,
            f"the tensor {name!r} at bytes {offset} to {offset + length} of {location!r}, which has {size} bytes",
            f"{byte_count} bytes of data inside that file",
            "download the file again",
        )
    return lambda: np.memmap(path, np.uint8, "r", offset, byte_count) if byte_count else b""


def locate_external_data(location: str, file: Path, name: str) -> Path:
    """Returns the path of the data of the tensor `name`. Raises ConvertError unless it is a file in `file`'s folder.

    Links are followed inside that folder, and from a Hugging Face snapshot into its repository's blobs; see
    `leaves_folder`.
    """
    refusal = ConvertError(
        file,
        f"external data at {location!r} for the tensor {name!r}",
        "a file beside the ONNX file",
        "get the model from a source that you trust",
    )
    relative = Path(location)
    is_plain = location and not any(character in location for character in "\0:\\")
    if not is_plain or relative.is_absolute() or ".." in relative.parts:
        raise refusal
    if leaves_folder(file.parent / relative, file.parent):
        raise refusal
    path = Path(os.path.realpath(file.parent / relative))
    try:
        path.stat()
    except OSError as problem:
        found = f"no file {location!r}, which holds the tensor {name!r} ({problem.strerror})"
        raise ConvertError(file, found, "the data file beside the ONNX file", f"download {location}") from None
    if not path.is_file():
        raise refusal
    check_not_lfs_pointer(file.parent / relative, ConvertError)
    return path
