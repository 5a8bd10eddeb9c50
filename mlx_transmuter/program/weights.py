"""The safetensors of a converted folder: one file, or shards with an index in the form of `huggingface_hub` and MLX."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx

from mlx_transmuter.folder_format import WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from mlx_transmuter.git_lfs import check_not_lfs_pointer
from mlx_transmuter.program import Program, ProgramError

MAX_SHARD_BYTES = 5 * 2**30


def save(
    folder: Path, items: Iterable[tuple[str, int, Callable[[], mx.array]]], shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes the arrays of `items` (name, bytes, a function that returns the array) to `folder`.

    At most one shard's arrays are in memory at a time. An empty program has an empty file.
    """
    shards: list[list[tuple[str, int, Callable[[], mx.array]]]] = [[]]
    filled = 0
    for item in items:
        if shards[-1] and filled + item[1] > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item[1]
    names = (
        [WEIGHTS_FILE]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    file_of_weight = {}
    for file, shard in zip(names, shards, strict=True):
        arrays = {name: read() for name, _, read in shard}
        write_safetensors(folder / file, arrays, {"format": "mlx"})
        file_of_weight |= dict.fromkeys(arrays, file)
        del arrays  # before the next shard is read
    if len(shards) > 1:
        total = sum(size for shard in shards for _, size, _ in shard)
        index = {"metadata": {"total_size": total}, "weight_map": file_of_weight}
        (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


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
