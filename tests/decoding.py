"""Decoders for the tests: unrewritten graphs, and greedy decoding without the generation loop."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES, golden

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import trials
from mlx_transmuter.model import load_folder
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks


@functools.cache
def unrewritten_module(name: str) -> ProgramModule:
    """The fixture's module with past and present as the graph has them, not over pools."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr(trials, "POOL_REWRITES", ())
        module = load_folder(convert(FIXTURES / name, "model.onnx", Path(place) / name, progress=False)).decoder
        mx.eval(module.parameters())
    assert not any(value.name == "index" for value in module.program.inputs)
    return module


def rows_of(name: str) -> list[dict]:
    return golden(name)["rows"]


def prefill(session, prompts: list[list[int]]) -> np.ndarray:
    """Returns the logits [rows, vocab] after each prompt."""
    last, start = None, 0
    for chunk in prefill_chunks(max(map(len, prompts)), prompt_mode=session.decoder.prompt_mode):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        counts = [len(piece) for piece in pieces]
        logits = session.step(np.array([piece + [0] * (chunk - len(piece)) for piece in pieces], np.int32), counts)
        session.evaluate(logits)
        actual = np.array(logits)
        last = actual.copy() if last is None else last
        for row, count in enumerate(counts):
            if count:
                last[row] = actual[row]
        start += chunk
    assert last is not None
    return last


def greedy(session, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
    """Returns new[r] tokens after each prompt, the likeliest each time."""
    logits = prefill(session, prompts)
    texts: list[list[int]] = [[] for _ in prompts]
    while True:
        for row, text in enumerate(texts):
            if len(text) < new[row]:
                text.append(int(logits[row].argmax()))
        counts = [int(len(text) < count) for text, count in zip(texts, new, strict=True)]
        if not any(counts):
            return texts
        step = session.step(np.array([[text[-1] if text else 0] for text in texts], np.int32), counts)
        session.evaluate(step)
        logits = np.where(np.array(counts)[:, None] > 0, np.array(step), logits)


def decoded(decoder: Decoder, rows: list[dict], **layout) -> list[list[int]]:
    """Returns the tokens after the rows' prompts, as many as their goldens have, group by group."""
    texts: list[list[int]] = [[] for _ in rows]
    for group in decoder.group_rows([len(row["prompt"]) for row in rows]):
        prompts = [row["prompt"] if i in group else [] for i, row in enumerate(rows)]
        new = [len(row["tokens"]) if i in group else 0 for i, row in enumerate(rows)]
        session = decoder.begin_session(
            [len(prompt) + count for prompt, count in zip(prompts, new, strict=True)], **layout
        )
        for i, text in enumerate(greedy(session, prompts, new)):
            texts[i] += text
        assert session.copied_slots == 0
        session.close()
    return texts


def tokens_of(rows: list[dict]) -> list[list[int]]:
    return [row["tokens"] for row in rows]
