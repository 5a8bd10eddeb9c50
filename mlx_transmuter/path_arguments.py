"""Paths and names that users give: text that may be one, before anything is read or written at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mlx_transmuter.errors import TransmuterError, shorten


def as_name(value: object, where: str, error: Callable[..., TransmuterError], expected: str = "a name") -> str:
    """The name, a str that is not blank and has no NUL. Raises `error`, whose `where` is the argument, for anything
    else."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise error(where=where, found="an empty name" if value == "" else shorten(value), expected=expected)
    return value


def as_path(value: object, where: str, error: Callable[..., TransmuterError], expected: str = "a path") -> Path:
    """The path of a str or path object, its ~ expanded. Raises `error` for anything else, an empty str (which pathlib
    would take for the current folder), and a path that the system cannot look up."""
    if isinstance(value, os.PathLike) and not isinstance(value, Path):
        value = os.fspath(value)
    if not isinstance(value, Path):
        value = as_name(value, where, error, expected)
    try:
        path = Path(value).expanduser()
        os.fsencode(path)
        path.exists()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as problem:  # too long, no permission; no such user; a NUL or half a surrogate
        found = f"{shorten(str(value))} ({getattr(problem, 'strerror', None) or problem})"
        raise error(where=where, found=found, expected=expected) from None
    return path
