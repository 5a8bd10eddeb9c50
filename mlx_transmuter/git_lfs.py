"""Pointers of Git LFS: the small text files that stand for large ones where `git lfs pull` has not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_transmuter.errors import TransmuterError

_FIRST_LINE = b"version https://git-lfs.github.com/spec/v1"


def check_not_lfs_pointer(path: Path, error: Callable[..., TransmuterError]) -> None:
    """Raises the error, made of where, found, expected and do, where the file is a pointer of Git LFS."""
    with open(path, "rb") as file:
        if file.read(len(_FIRST_LINE)) != _FIRST_LINE:
            return
    raise error(
        where=str(path),
        found="a Git LFS pointer",
        expected="the file that it stands for",
        do="run git lfs pull in the repository that it is from, or download the file itself",
    )
