"""Folders that an earlier version converted still load, and give the tokens of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import golden

import mlx_transmuter as mt
from mlx_transmuter import generation

FOLDERS = Path(__file__).parent / "converted_folders"
NAMES = sorted(path.parent.name for path in FOLDERS.glob("*/program.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_of_an_earlier_version_gives_the_tokens_of_the_reference(name):
    model, reference = mt.load(FOLDERS / name), golden(name)
    context = generation.context(model, max_new_tokens=reference["max_new_tokens"], do_sample=False)
    prompts = [row["prompt"] for row in reference["rows"]]
    rows = generation.generate(generation.compile(context, len(prompts)), prompts, [0] * len(prompts))
    assert [[token.id for token in row] for row in rows] == [row["tokens"] for row in reference["rows"]]


def test_there_are_such_folders():
    assert len(NAMES) >= 4
