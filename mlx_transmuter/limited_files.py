"""Files that stand beside a model: regular ones, whole, and read only up to the size that such files have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_transmuter.errors import TransmuterError, first_line
from mlx_transmuter.git_lfs import check_not_lfs_pointer

# What the files may be at most; the largest tokenizer.json of the hub (Gemma 3) has 33 MB, the largest template 30 KB.
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_TEMPLATE_BYTES = 2**20

ErrorType = Callable[..., TransmuterError]


def check_file(file: Path, limit: int, error: ErrorType) -> None:
    """Raises the error for anything but a regular file of at most `limit` bytes, and for a pointer of Git LFS."""
    if not file.is_file():
        raise error(where=file, found="a device, a pipe or a folder" if file.exists() else "no file", expected="a file")
    check_not_lfs_pointer(file, error)
    size = file.stat().st_size
    if size > limit:
        raise error(where=file, found=f"{size:,} bytes", expected=f"at most {limit:,}")


def read_limited(file: Path, limit: int, error: ErrorType) -> bytes:
    """Returns the bytes of the file. Raises the error as `check_file` does."""
    check_file(file, limit, error)
    return file.read_bytes()


def decode_utf8(data: bytes, file: Path, error: ErrorType) -> str:
    """Returns the text of the bytes of `file`. Raises the error for bytes that are no UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as problem:
        raise error(where=file, found=str(problem), expected="UTF-8", do="download the file again") from None


def read_json_object(file: Path, error: ErrorType) -> dict[str, Any]:
    """Returns the JSON object in a file; {} where there is no file. Raises the error for anything else."""
    if not file.exists():
        return {}
    data = read_limited(file, MAX_JSON_BYTES, error)
    do = "download the file again"
    try:
        value = json.loads(decode_utf8(data, file, error))
    except (json.JSONDecodeError, RecursionError) as problem:
        raise error(where=file, found=f"no JSON ({first_line(problem)})", expected="a JSON object", do=do) from None
    except ValueError as problem:  # an integer of too many digits
        raise error(where=file, found=first_line(problem), expected="a JSON object", do=do) from None
    if not isinstance(value, dict):
        raise error(where=file, found=f"JSON of a {type(value).__name__}", expected="a JSON object", do=do)
    return value
