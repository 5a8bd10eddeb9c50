"""The user's cache: where converted folders and listings of repositories lie."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mlx_transmuter.folder_format import stays_inside
from mlx_transmuter.partial_folder import partial_folder


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
