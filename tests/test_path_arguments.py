"""Paths and names that are none, at every call that takes one: an error that names the argument, and nothing is read."""

import os
from pathlib import Path, PurePosixPath

import pytest
from conftest import FIXTURES

import mlx_transmuter as mt
from mlx_transmuter import generation
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.path_arguments import as_path
from mlx_transmuter.precision_options import PrecisionError, Quantization
from mlx_transmuter.tokenizer import Tokenizer

NO_NAMES = ["", " ", 3, True, 1.5, b"x", [], {}, "a\0b"]
NO_PATHS = [*NO_NAMES, None, "a" * 5000, "~nobody-of-that-name/x", "\ud800"]
LLAMA = FIXTURES / "llama"
CALLS = {
    "source": [mt.load, lambda value: mt.convert(value, "out")],
    "out": [lambda value: mt.convert(LLAMA, value)],
    "file": [lambda value: mt.load(LLAMA, file=value), lambda value: mt.convert(LLAMA, "out", file=value)],
    "revision": [lambda value: mt.load("user/name", revision=value)],
    "dtype": [lambda value: mt.load(LLAMA, dtype=value)],
    "folder": [Tokenizer.from_folder],
    "path": [lambda value: generation.PromptCache.load(value, None)],
}


@pytest.mark.parametrize("argument", CALLS)
def test_what_is_no_name_is_refused_by_the_argument(argument, tmp_path, monkeypatch):
    (tmp_path / "model.onnx").write_bytes(b"the current folder is a source, and yet none is named")
    (tmp_path / "tokenizer.json").write_bytes(b"no JSON")
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    names = NO_NAMES if argument in ("file", "revision", "dtype") else NO_PATHS
    for call in CALLS[argument]:
        for value in names:
            with pytest.raises(TransmuterError, match=f"^{argument}: found"):
                call(value)
    assert sorted(os.listdir()) == before


def test_a_path_is_a_str_or_a_path_object_of_any_kind(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    for path in ("~/x", Path("~/x"), PurePosixPath("~/x")):
        assert as_path(path, "path", TransmuterError) == Path("/home/somebody/x")


@pytest.mark.parametrize("quantize", [3, True, [], 1.5, b"4bit", None, {"bits": 0}, {"group_size": 0}, {"recipe": ""}])
def test_a_quantization_that_is_none_is_refused(quantize):
    with pytest.raises(PrecisionError, match=r"expected"):
        Quantization.of(quantize)
