"""Scores that leave no token to select: an error that names row and step, once the other rows are done."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fake_decoder import FakeDecoder, logits_after
from fake_generation import compile_fake, fake_model, run_batch
from setting_strategies import VOCAB

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError, ScoreError

NAN, INF = np.nan, np.inf
BAD = 9  # the first token of the rows whose logits are replaced


class FaultyDecoder(FakeDecoder):
    """A fake decoder that replaces logits of the rows that begin with BAD, from `length` tokens on."""

    def __init__(self, rows: int, replacement, length: int, **options):
        super().__init__(rows, VOCAB, **options)
        self.replacement, self.length = replacement, length

    def next_logits(self, tokens):
        logits = super().next_logits(tokens)
        if tokens[0] == BAD and len(tokens) >= self.length:
            logits = np.where(np.isnan(self.replacement) | np.isinf(self.replacement), self.replacement, logits)
        return logits.astype(np.float32)


ALL_NAN, ALL_REMOVED = np.full(VOCAB, NAN), np.full(VOCAB, -INF)
ONE_NAN = np.where(np.arange(VOCAB) == VOCAB - 1, NAN, 0.0)
ONE_INFINITE = np.where(np.arange(VOCAB) == 5, INF, 0.0)
HALF_REMOVED = np.where(np.arange(VOCAB) % 2, -INF, 0.0)
KINDS = {
    "greedy": {},
    "greedy, ahead": {"fake": {"runs_ahead": True}},
    "sampled": {"do_sample": True, "temperature": 1.5},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
}
PROMPTS, SEEDS = [[3, 4], [BAD, 4, 5], [6]], [1, 2, 3]


def compile_faulty(replacement, length: int, batch: int = len(PROMPTS), **options):
    fake = options.pop("fake", {})
    ctx = generation.context(fake_model(), token_logprobs=True, **{"max_new_tokens": 6, **options})
    decoder = FaultyDecoder(batch * ctx.settings.rows_per_prompt, replacement, length, **fake)
    return generation.compile(ctx, batch, decoder=decoder)


@pytest.mark.parametrize("replacement", [ALL_NAN, ONE_NAN, ALL_REMOVED], ids=["nan", "one nan", "removed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [0, 2])
def test_the_error_names_row_and_step_and_has_the_results_of_the_others(kind, replacement, step):
    options = KINDS[kind]
    gen = compile_faulty(replacement, len(PROMPTS[1]) + step, **options)
    with pytest.raises(ScoreError) as raised:
        run_batch(gen, PROMPTS, SEEDS)
    error, per_prompt = raised.value, options.get("num_return_sequences", 1)
    assert error.rows[0] == per_prompt
    assert set(error.steps) == {step}
    assert f"row {per_prompt}, step {step}" in str(error)
    # The logarithm of the softmax of -inf alone, which beams add up, is NaN.
    is_removed = replacement is ALL_REMOVED and "num_beams" not in options
    assert ("no token that is left" if is_removed else "NaN") in error.found
    assert isinstance(gen.decoder, FaultyDecoder)
    assert all(session.closed for session in gen.decoder.sessions)
    failed = {row for row, result in enumerate(error.results) if result.finish_reason == "error"}
    assert set(error.rows) <= failed <= {per_prompt, 2 * per_prompt - 1}
    for row in (0, 2):
        alone = run_batch(compile_faulty(replacement, 0, 1, **options), [PROMPTS[row]], [SEEDS[row]])[1]
        assert error.results[row * per_prompt : (row + 1) * per_prompt] == alone
    assert error.results[per_prompt].finish_reason == "error"


@pytest.mark.parametrize("kind", KINDS)
def test_removed_tokens_are_no_error_and_never_selected(kind):
    results = run_batch(compile_faulty(HALF_REMOVED, 0, **KINDS[kind]), PROMPTS, SEEDS)[1]
    per_prompt = KINDS[kind].get("num_return_sequences", 1)
    assert all(token.id % 2 == 0 for token in results[per_prompt].tokens)
    assert np.isfinite([token.logprob for result in results for token in result.tokens]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_suppressed_is_an_error(kind):
    with pytest.raises(ScoreError, match=r"row 0, step 0.*no token that is left.*suppress_tokens"):
        run_batch(compile_fake(1, suppress_tokens=list(range(VOCAB)), **KINDS[kind]), [[3]])


def test_an_infinite_score_is_the_best_and_has_no_probability():
    """As in torch, whose argmax takes it and whose multinomial refuses its softmax."""
    (result,) = run_batch(compile_faulty(ONE_INFINITE, 0, 1), [PROMPTS[1]])[1]
    assert {token.id for token in result.tokens} == {5}
    with pytest.raises(ScoreError, match="an infinite score"):
        run_batch(compile_faulty(ONE_INFINITE, 0, 1, do_sample=True), [PROMPTS[1]])


@pytest.mark.parametrize("temperature", [1e-40, 0.0, -1.0, 1e-50])
def test_a_temperature_that_a_device_takes_for_0_is_refused_at_once(temperature):
    with pytest.raises(GenerationError, match="setting temperature"):
        generation.context(fake_model(), do_sample=True, temperature=temperature)


def test_a_temperature_that_makes_scores_infinite_is_an_error_and_one_that_does_not_selects_the_best():
    options = {"do_sample": True, "max_new_tokens": 3, "top_k": 0}
    with pytest.raises(ScoreError, match=r"row 0, step 0.*infinite.*temperature"):
        run_batch(compile_fake(1, temperature=1.2e-38, **options), [[3, 4]])
    (result,) = run_batch(compile_fake(1, temperature=1e-36, **options), [[3, 4]])[1]
    assert result.tokens[0].id == int(logits_after([3, 4], VOCAB).argmax())


def test_invalid_values_that_are_removed_are_no_error():
    (result,) = run_batch(compile_faulty(ALL_NAN, 0, 1, remove_invalid_values=True), [PROMPTS[1]])[1]
    assert [token.id for token in result.tokens] == [0] * 6


def test_beams_that_reach_a_dead_end_give_the_hypotheses_that_are_complete():
    """After 5, which an eos may follow, nothing may: as in transformers the complete text is the result."""

    def allow(row):
        new = row["generated"]
        return np.array([new[0] if new else -1], np.int32)

    def process(logits, last):
        ids = mx.arange(VOCAB)
        allowed = mx.where(last[0] == -1, ids == 5, (last[0] == 5) & ((ids == 1) | (ids == 6)))
        return mx.where(allowed, logits, -mx.inf)

    options = {"num_beams": 2, "eos_token_id": 1, "processors": [(allow, process)], "max_new_tokens": 6}
    (result,) = run_batch(compile_fake(1, **options), [[3]])[1]
    assert [token.id for token in result.tokens] == [5]
    with pytest.raises(ScoreError, match="row 0, step 2"):
        run_batch(compile_fake(1, **{**options, "eos_token_id": None, "suppress_tokens": [1]}), [[3]])
