"""What all tests share: the CPU backend, and the fixtures' models converted once a run."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings

from mlx_transmuter import api, cli
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import Model, load_folder
from mlx_transmuter.tasks import text

# The CPU backend unless MLX_TRANSMUTER_TEST_DEVICE=gpu asks for the goldens on Metal, compiled as users run them. On a CPU
# mx.compile builds kernels with the C++ compiler, some seconds a model: tests that need it ask for `compiling`.
ON_GPU = os.environ.get("MLX_TRANSMUTER_TEST_DEVICE") == "gpu"
mx.set_default_device(mx.gpu if ON_GPU else mx.cpu)
if not ON_GPU:
    mx.disable_compile()
# Hundreds of conversions run in the process of the tests, where they take no other Python's start; test_child_process.py
# has those that run in one of their own.
os.environ["MLX_TRANSMUTER_IN_PROCESS"] = "1"
# No test is about how long an example takes, least of all on a machine with other work. "quick" is for `make test-quick`,
# "thorough" for a search of hours.
settings.register_profile("untimed", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "untimed"))

FIXTURES = Path(__file__).parent / "fixtures"
# Every fixture that has a golden file; a new one is tested as soon as it is there.
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/golden.json"))


def golden(name: str) -> dict:
    """The golden of a fixture, with each row's logits as float32 [vocab]."""
    data = json.loads((FIXTURES / name / "golden.json").read_bytes())
    for row in data["rows"]:
        row["logits"] = np.frombuffer(base64.b64decode(row["logits"]), np.float32)
    return data


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A function of a fixture's name that gives its converted folder; each fixture is converted once."""
    root = tmp_path_factory.mktemp("converted")
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = convert(FIXTURES / name, "model.onnx", root / name, progress=False)
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def loaded(converted):
    """A function of a fixture's name that gives its Model; each is loaded once."""
    models: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in models:
            models[name] = load_folder(converted(name))
        return models[name]

    return model


@pytest.fixture
def compiling():
    """mx.compile at work, for tests of what is compiled and of what compiling changes."""
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache in a folder of the test, and errors as users see them."""
    monkeypatch.setenv("MLX_TRANSMUTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLX_TRANSMUTER_DEBUG", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def run(capsys):
    """A function of arguments that gives (exit code, stdout, stderr) of the command, run in this process."""

    def command(*args):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def folder(converted):
    return converted("llama")


def answer(folder, prompt, **settings):
    """The text that a task gives."""
    return text.generation(api.load(folder), **settings)(prompt).text
