"""The sweep: every setting alone and forty combinations on every architecture, against goldens of transformers.

The goldens' truth and form stand in tests/fixtures/README.md. Each case runs as a ragged batch of five, and again as
a batch of three or as one prompt alone.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES
from fake_generation import run_batch

from mlx_transmuter import generation
from mlx_transmuter.generation import SETTINGS
from mlx_transmuter.generation.batch import Batch
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.row_group import RowGroup

pytestmark = pytest.mark.slow

SWEEPS = {path.name.removesuffix(".json.gz"): path for path in sorted((FIXTURES / "sweep").glob("*.json.gz"))}
LOGPROB_TOLERANCE = 1e-4  # of float32 sums in another order; the goldens have five digits


def golden(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress(SWEEPS[name].read_bytes()))


class DecoderCache:
    """One decoder per number of rows, whose steps stay compiled over the cases."""

    def __init__(self, model: Any):
        self.model, self.decoders = model, {}

    def compile(
        self, batch: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> generation.CompiledGeneration:
        ctx = generation.context(self.model, token_logprobs=True, **{"do_sample": False, **options})
        rows = batch * ctx.settings.rows_per_prompt
        with monkeypatch.context() as patch:
            # Each case has its own selection: on a CPU, compiling it costs more than all its steps.
            patch.setattr(mx, "compile", lambda function: function)
            gen = generation.compile(ctx, batch, decoder=self.decoders.get(rows))
        self.decoders[rows] = gen.decoder
        return gen


def batch_slices(place: int) -> Iterator[slice]:
    """Yields the slices of the five prompts that the case of this index runs as a batch."""
    yield slice(0, 5)
    yield slice(1, 4) if place % 2 else slice(place // 2 % 5, place // 2 % 5 + 1)


def describe_difference(
    case: dict[str, Any], expected: list[list[list[Any]]], found: list[generation.GenerationResult]
) -> str | None:
    """Returns how the results of some prompts differ from their golden rows, a list per prompt; None if they agree."""
    rows = [row for prompt in expected for row in prompt]
    assert len(rows) == len(found)
    for row, result in zip(rows, found, strict=True):
        tokens, logprobs, ended, *score = row
        ids = [token.id for token in result.tokens]
        if ids != tokens:
            return f"tokens {ids}, not {tokens}, under {case['settings']}"
        if result.finish_reason != ("length" if ended is None else "stop"):
            return f"finish_reason {result.finish_reason} under {case['settings']}"
        far = max([abs(token.logprob - want) for token, want in zip(result.tokens, logprobs, strict=True)], default=0)
        if far > LOGPROB_TOLERANCE or (
            score and abs(result.score - score[0]) > LOGPROB_TOLERANCE * (1 + abs(score[0]))
        ):
            return f"log-probabilities {far} off, score {result.score}, not {score}, under {case['settings']}"
    return None


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("part", ["alone", "together"])
@pytest.mark.parametrize("name", SWEEPS)
def test_results_are_those_of_transformers(name, part, loaded, monkeypatch):
    data, decoders, failures = golden(name), DecoderCache(loaded(name)), []
    for place, case in enumerate(data[part]):
        for batch in batch_slices(place):
            prompts = data["prompts"][batch]
            gen = decoders.compile(len(prompts), case["settings"], monkeypatch)
            if problem := describe_difference(case, case["rows"][batch], run_batch(gen, prompts)[1]):
                failures.append(f"case {place}, prompts {batch.start} to {batch.stop}: {problem}")
    assert not failures, f"{len(failures)} of {len(data[part])}:\n" + "\n".join(failures[:10])


@pytest.mark.parametrize("name", SWEEPS)
def test_the_scores_that_sampling_draws_from_are_those_of_transformers(name, loaded):
    data, model = golden(name), loaded(name)
    prompts = [data["prompts"][place] for place in data["sampled_prompts"]]
    decoder = None
    for case in data["sampled"]:
        ctx = generation.context(model, max_new_tokens=1, **case["settings"])
        gen = generation.compile(ctx, len(prompts), decoder=decoder)
        decoder = gen.decoder
        found = first_scores(gen, prompts)
        for row, expected in zip(found, case["scores"], strict=True):
            remaining = np.unpackbits(np.frombuffer(bytes.fromhex(expected["kept"]), np.uint8))[: len(row)].astype(bool)
            np.testing.assert_array_equal(np.isfinite(row), remaining, err_msg=str(case["settings"]))
            shown = np.flatnonzero(remaining)[:: expected["stride"]]
            values = np.frombuffer(base64.b64decode(expected["values"]), "<f4")
            np.testing.assert_allclose(
                row[shown], values, atol=2e-4 * np.ptp(row[remaining]) + 1e-4, err_msg=str(case["settings"])
            )


def first_scores(gen: generation.CompiledGeneration, prompts: list[list[int]]) -> np.ndarray:
    """Returns the processed scores [prompts, vocab] of the first new token."""
    group = RowGroup(Batch(gen, prompts, [0] * len(prompts), {}), range(len(prompts)))
    logits = group.prefill()
    assert logits is not None
    state, fixed = group.initial_state(row_random_keys([0] * len(prompts), 1))
    given = group.host_inputs.arrays_for([list(prompt) for prompt in prompts])
    found = np.array(gen.selection.process_scores(logits.astype(mx.float32), state, fixed | given))
    group.session.close()
    return found


@pytest.mark.skipif(not SWEEPS, reason="no sweep is there")
def test_every_setting_changes_a_golden():
    """The goldens have a setting's case only where it changed a result; here each setting must have one."""
    changed = {"do_sample"}
    for name in SWEEPS:
        data = golden(name)
        changed |= {case["alone"] for case in data["alone"] if "alone" in case}
        plain = next(case["scores"] for case in data["sampled"] if case["settings"] == {"do_sample": True})
        changed |= {key for case in data["sampled"] if case["scores"] != plain for key in case["settings"]}
    assert {name for name, setting in SETTINGS.items() if setting.has_goldens} == changed
