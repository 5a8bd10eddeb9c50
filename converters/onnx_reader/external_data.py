"""External data of an ONNX file: which files it may lie in."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_transmuter.converters.errors import ConvertError


def locate_external_data(location: str, file: Path, name: str) -> Path:
    """The path of external data. Raises ConvertError unless it lies in the folder of `file`.

    The one link that is followed out of the folder is that of a Hugging Face snapshot, whose files all point into the
    repository's own `blobs`: `models--x/snapshots/<commit>/…` to `models--x/blobs/<hash>`.
    """
    wrong = ConvertError(
        file,
        f"external data at {location!r} for the tensor {name!r}",
        "a file beside the model",
        "do not trust this model",
    )
    parts = Path(location).parts
    if (
        not location
        or "\0" in location
        or Path(location).is_absolute()
        or ".." in parts
        or ":" in location
        or "\\" in location
    ):
        raise wrong
    folder = Path(os.path.realpath(file.parent))
    real = Path(os.path.realpath(folder / location))
    if not (real.is_relative_to(folder) or real.parent in _snapshot_blobs(folder)):
        raise wrong
    try:
        real.stat()
    except OSError as problem:
        found = f"no file {location!r}, which holds the tensor {name!r} ({problem.strerror})"
        raise ConvertError(file, found, "it beside the model", "download it too") from None
    if not real.is_file():
        raise wrong
    return real


def _snapshot_blobs(folder: Path) -> list[Path]:
    """The blobs of the repository in whose snapshot the real path `folder` lies, if it lies in one."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    blobs = snapshots.parent / "blobs" if snapshots else None
    return [blobs] if blobs and blobs.is_dir() and not blobs.is_symlink() else []
