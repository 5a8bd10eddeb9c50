"""The demo model of the package: converted as a user's model is, it says what its training text holds to be true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlx_transmuter
from mlx_transmuter import text
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder

pytestmark = pytest.mark.slow

DEMO = Path(mlx_transmuter.__file__).parent / "demo"
CHECKS = json.loads((DEMO / "checks.json").read_bytes())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return load_folder(convert(DEMO, "model.onnx", tmp_path_factory.mktemp("demo") / "demo", progress=False))


def test_it_is_small_enough_to_ship_and_large_enough_to_be_a_model(demo):
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    assert size <= 4_000_000
    parameters = sum(array.size for name, array in demo.decoder.weights().items() if name.endswith("weight"))
    assert 1_000_000 <= parameters <= 3_000_000


def test_its_completions_are_right(demo):
    """checks.json comes from the text's generator, not from the model: sums, capitals, opposites, days, small talk."""
    assert len(CHECKS) >= 50
    assert sum("messages" in check for check in CHECKS) >= 5
    generate = text.generation(demo, do_sample=False, max_new_tokens=120)
    results = generate([check.get("messages") or check["prompt"] for check in CHECKS])
    wrong = [
        (check.get("prompt") or check["messages"][-1]["content"], result.text, check["completion"])
        for check, result in zip(CHECKS, results, strict=True)
        if not result.text.startswith(check["completion"])
    ]
    assert not wrong


def test_it_tells_a_story_to_its_end(demo):
    (result,) = text.generation(demo, do_sample=False, max_new_tokens=200)(
        [[{"role": "user", "content": "Tell me a story about a fox."}]]
    )
    assert result.finish_reason == "stop"
    assert result.text.startswith("Once upon a time")
    assert "fox" in result.text
    assert result.text.rstrip().endswith("The end.")
