"""Generation and the reference loops against transformers itself, over the same fake model. Needs the `fixtures` extra."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_decoder import logits_after
from fake_generation import compile_fake, run_batch
from reference_loops import greedy, process_scores
from setting_strategies import (
    REMOVING_SETTINGS,
    TRANSFORMERS_PROCESSOR_SETTINGS,
    TRANSFORMERS_SAMPLING_SETTINGS,
    VOCAB,
)

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def transformers_model():
    from fake_transformers_model import FakeTransformersModel

    return FakeTransformersModel(VOCAB)


def draw_settings(rng: random.Random, beams: bool) -> dict | None:
    """Returns settings drawn at random; None for a combination under which the next token is arbitrary."""
    options = {
        name: rng.choice(TRANSFORMERS_PROCESSOR_SETTINGS[name])
        for name in rng.sample(sorted(TRANSFORMERS_PROCESSOR_SETTINGS), rng.choice([1, 2, 3, 4]))
    }
    options |= {"max_new_tokens": rng.choice([2, 5, 9]), "eos_token_id": rng.choice([1, [1, 2], [0, 1, 2, 3, 9]])}
    if "exponential_decay_length_penalty" in options and REMOVING_SETTINGS & options.keys():
        return None
    if {"no_repeat_ngram_size", "encoder_no_repeat_ngram_size"} <= options.keys():
        return None
    if beams:
        options["num_beams"] = rng.choice([2, 3, 4])
        options["length_penalty"] = rng.choice([1.0, 0.0, -1.0, 2.0])
        options["early_stopping"] = rng.choice([True, False, "never"])
    return options


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_tokens_scores_and_log_probabilities_are_those_of_transformers(transformers_model, seed, beams):
    rng = random.Random(f"{seed} {beams}")
    options = next(filter(None, iter(lambda: draw_settings(rng, beams), "never")))
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 7, 12]))] for _ in range(3)]
    gen = compile_fake(
        3, fake={"by_length": seed % 2 == 1, "runs_ahead": seed % 3 == 1}, token_logprobs=True, **options
    )
    for prompt, result in zip(prompts, run_batch(gen, prompts)[1], strict=True):
        ((tokens, logprobs, score),) = transformers_model.generate_results(prompt, **options)
        assert [token.id for token in result.tokens] == tokens, (prompt, options)
        np.testing.assert_allclose([token.logprob for token in result.tokens], logprobs, atol=1e-4)
        if beams:
            assert result.score == pytest.approx(score, abs=1e-4)
        else:
            plain = greedy(lambda tokens: logits_after(tokens, VOCAB), prompt, **options)
            assert plain[0] == tokens
            np.testing.assert_allclose(plain[1], logprobs, atol=1e-4)


@pytest.mark.parametrize("name", TRANSFORMERS_PROCESSOR_SETTINGS)
def test_each_setting_alone_is_that_of_transformers(transformers_model, name):
    for value in TRANSFORMERS_PROCESSOR_SETTINGS[name]:
        options = {name: value, "max_new_tokens": 8, "eos_token_id": [1, 2]}
        prompts = [[3], [4, 5, 3, 4, 5, 6], [9, 9]]
        found = run_batch(compile_fake(3, **options), prompts)[1]
        expected = [transformers_model.generate_results(prompt, **options)[0][0] for prompt in prompts]
        assert [[token.id for token in result.tokens] for result in found] == expected


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_the_scores_that_sampling_draws_from_are_those_of_transformers(transformers_model, seed, beams):
    torch = pytest.importorskip("torch")

    rng = random.Random(f"{seed} {beams}")
    options = {"do_sample": True, "top_k": 0, "num_beams": beams, "eos_token_id": [1, 2], "max_new_tokens": 1}
    options |= {
        name: rng.choice(TRANSFORMERS_SAMPLING_SETTINGS[name])
        for name in rng.sample(sorted(TRANSFORMERS_SAMPLING_SETTINGS), rng.choice([1, 2, 4]))
    }
    torch.manual_seed(0)
    prompt = [rng.randrange(VOCAB) for _ in range(3)]
    out = transformers_model.generate(
        torch.tensor([prompt]),
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=False,
        pad_token_id=0,
        **options,
    )
    logits = logits_after(prompt, VOCAB)
    if beams > 1:
        logits = np.log(np.exp(logits) / np.exp(logits).sum())
    expected = out.scores[0][0].numpy()
    np.testing.assert_allclose(process_scores(logits, prompt, [], **options), expected, atol=1e-4)


def test_a_greedy_result_that_a_nan_ends_is_that_of_transformers(transformers_model):
    """min_length removes the eos and the decay adds infinity to it: transformers takes the NaN, and so do we."""
    options = {"max_new_tokens": 9, "eos_token_id": 1, "min_length": 20, "exponential_decay_length_penalty": (2, 1.5)}
    expected = transformers_model.generate_results([3, 4], **options)[0][0]
    assert [token.id for token in run_batch(compile_fake(1, **options), [[3, 4]])[1][0].tokens] == expected
    assert len(expected) == 3


def test_several_beam_hypotheses_are_those_of_transformers(transformers_model):
    options = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "max_new_tokens": 7,
        "eos_token_id": [1, 2],
        "length_penalty": 0.5,
    }
    found = run_batch(compile_fake(1, **options), [[3, 4, 5]])[1]
    expected = transformers_model.generate_results([3, 4, 5], **options)
    assert [[token.id for token in result.tokens] for result in found] == [tokens for tokens, _, _ in expected]
    np.testing.assert_allclose([result.score for result in found], [score for _, _, score in expected], atol=1e-4)
