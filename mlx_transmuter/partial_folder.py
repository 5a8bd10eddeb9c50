"""Partial folders: where what is written lies until it is whole, beside the place that it then takes by a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".partial"


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder beside the target, and removes it with what is left in it, whatever ends the block.

    Those that killed processes left for this target are removed first.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_folders(target.parent, _prefix(target))
        folder, lock = _make_locked_folder(target)
    except OSError as error:
        if error.filename is not None and is_in_partial_folder(error.filename):
            error.filename = str(target.parent)
        raise
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_folders(parent: Path, prefix: str = ".") -> None:
    """Removes the partial folders in `parent`, of names that begin so, which no process holds any more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(prefix) and name.endswith(_SUFFIX):
                _remove_if_stale(parent / name)


def is_in_partial_folder(path: str | Path) -> bool:
    """Whether a path leads into a partial folder, of which no user knows."""
    return any(part.startswith(".") and part.endswith(_SUFFIX) for part in Path(path).parts)


def _prefix(target: Path) -> str:
    name = target.name.encode(errors="surrogateescape")[:120].decode(errors="ignore")  # a file's name has 255 bytes
    return f".{name}."


def _make_locked_folder(target: Path) -> tuple[Path, int]:
    """Returns a new folder, and its descriptor with a lock that ends with this process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=_SUFFIX, dir=target.parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else gets one either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # before it was locked, another process took it for a stale one


def _remove_if_stale(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its process is at work
        pass
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def describe_write_error(error: OSError) -> tuple[str, str]:
    """What stands in the way of writing, and what mends it; "" for an error that is not of room."""
    if error.errno == errno.ENOSPC:
        return "a full disk", "make room on it, or write to another"
    if error.errno == errno.EDQUOT:
        return "a disk quota that is used up", "make room in it, or write to another disk"
    if error.errno == errno.EFBIG:
        return "a limit on the size of files", "raise it (ulimit -f), or write to another file system"
    return "", ""
