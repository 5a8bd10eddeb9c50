"""Conversions for the tests: one that must succeed, and one that must leave everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert


def convert_model(source: Path, out: Path) -> Path:
    """Converts `model.onnx` of a folder."""
    return convert(source, "model.onnx", out, progress=False)


def folder_contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(source: Path, out: Path, match: str = "", error: type[BaseException] = ConvertError) -> Any:
    """Checks that the conversion ends in the error and leaves everything around the target as it was; gives the error."""
    around = out.parent
    before = (out.exists(), folder_contents(around) if around.exists() else {})
    with pytest.raises(error, match=match or None) as raised:
        convert_model(source, out)
    assert (out.exists(), folder_contents(around) if around.exists() else {}) == before
    assert not around.exists() or not list(around.glob(".*"))
    return raised.value
