"""The user's cache: where converted folders and listings of repositories lie, and how they get there whole."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_transmuter.folder_format import stays_inside


def cache_folder() -> Path:
    """The user's cache of converted folders."""
    named = os.environ.get("MLX_TRANSMUTER_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named).expanduser() if named else Path(base).expanduser() / "mlx_transmuter"


def listing_file(repo: str, commit: str) -> Path:
    """Where the names of a commit's files are kept, so that a second use asks the hub nothing."""
    return cache_folder() / "listings" / repo.replace("/", "--") / f"{commit}.json"


def read_listing(file: Path) -> tuple[str, ...] | None:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_valid = isinstance(names, list) and all(isinstance(name, str) and stays_inside(name) for name in names)
    return tuple(names) if is_valid else None


def write_listing(file: Path, names: Iterable[str]) -> None:
    with partial_folder(file) as place:
        (place / "listing").write_text(json.dumps(sorted(names)), encoding="utf-8")
        os.replace(place / "listing", file)


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A folder beside the place where its content will go, so that a rename moves it; removed whatever happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:60]}.", suffix=".partial", dir=target.parent) as folder:
        yield Path(folder)
