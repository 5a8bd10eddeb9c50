"""Files of a tokenizer, read only up to a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_transmuter.errors import first_line
from mlx_transmuter.git_lfs import check_not_lfs_pointer
from mlx_transmuter.tokenizer.errors import TokenizerError

# What the files may be at most; the largest tokenizer.json of the hub (Gemma 3) has 33 MB, the largest template 30 KB.
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_TEMPLATE_BYTES = 2**20


def read_limited(file: Path, limit: int) -> bytes:
    """The bytes of the file. Raises TokenizerError for more than `limit`, and for a pointer of Git LFS."""
    check_not_lfs_pointer(file, TokenizerError)
    size = file.stat().st_size
    if size > limit:
        raise TokenizerError(f"{size:,} bytes", where=file, expected=f"at most {limit:,}")
    return file.read_bytes()


def decode_utf8(data: bytes, file: Path) -> str:
    """The text of the bytes of `file`. Raises TokenizerError for bytes that are no UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(str(error), where=file, expected="UTF-8") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file. Raises TokenizerError for anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(decode_utf8(read_limited(file, MAX_JSON_BYTES), file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(first_line(error), where=file, expected="JSON") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"JSON {type(value).__name__}", where=file, expected="an object")
    return value
