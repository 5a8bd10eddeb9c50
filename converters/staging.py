"""The folder in which a conversion is made beside its target, whose place it takes when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.folder_format import PROGRAM_FILE
from mlx_transmuter.partial_folder import partial_folder
from mlx_transmuter.program import PROGRAM_FORMAT


@contextmanager
def stage_folder(out: Path, onnx_file: Path, *, replace_converted: bool = True) -> Iterator[Path]:
    """Gives an empty folder beside `out`, which it replaces when the block ends; an error there leaves `out` as it was.

    Without `replace_converted`, a converted folder that another process put there meanwhile stays in its place. Raises
    ConvertError for a target that a conversion of `onnx_file` must not replace.
    """
    check_output_folder(out, onnx_file)
    with partial_folder(out) as temporary:
        folder = temporary / "model"
        folder.mkdir()
        yield folder
        if replace_converted:
            move_into_place(folder, out, temporary / "old")
        else:
            move_unless_converted(folder, out)


def check_output_folder(out: Path, onnx_file: Path) -> None:
    """Raises ConvertError for a target that is neither absent, nor empty, nor a converted folder without the source."""
    if not (out.exists() or out.is_symlink()):
        return
    free = out.is_dir() and (not any(out.iterdir()) or is_converted_folder(out))
    if not free or onnx_file.resolve().is_relative_to(out.resolve()):
        raise ConvertError(
            out,
            "files that are no converted folder, or the folder of the source",
            "a new or empty folder, or a converted one",
            "choose another target",
        )
    if out.resolve() == Path.cwd() or out.is_mount():  # it cannot be renamed, or a shell would lose its folder
        raise ConvertError(
            out, "the current folder, or the root of a disk", "a folder that can be replaced", "name one inside it"
        )


def is_converted_folder(folder: Path) -> bool:
    """Returns whether the folder holds a saved program."""
    if not (folder / PROGRAM_FILE).is_file():
        return False
    with open(folder / PROGRAM_FILE, "rb") as file:
        return f'"{PROGRAM_FORMAT}"'.encode() in file.read(256)


def move_unless_converted(folder: Path, out: Path) -> None:
    """Renames the complete folder to `out`, unless a converted folder is there."""
    try:
        folder.rename(out)
    except OSError:
        if not is_converted_folder(out):
            raise


def move_into_place(folder: Path, out: Path, backup: Path) -> None:
    """Renames the complete folder to `out`; a folder of that name is moved away first and is back if that fails."""
    try:
        if out.exists():
            out.rename(backup)
        folder.rename(out)
    except BaseException:
        if backup.exists() and not out.exists():
            backup.rename(out)
        raise
