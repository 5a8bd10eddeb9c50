"""Generation and the plain loops against transformers itself, over the same fake model. Needs the `fixtures` extra."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_decoder import logits_after
from fake_generation import VOCAB, compile_fake, run_batch
from reference_loops import greedy, process_scores

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SETTING_VALUES = {
    "repetition_penalty": [1.3, 0.7, 5.0],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[3], [4]], [[5, 6], [7], [1], [1, 2, 3], [8, 8]]],
    "min_length": [6, 10],
    "min_new_tokens": [3, 9],
    "forced_bos_token_id": [5],
    "forced_eos_token_id": [1, 7],
    "suppress_tokens": [[4, 5, 6]],
    "begin_suppress_tokens": [[0, 3, 4, 1]],
    "renormalize_logits": [True],
    "encoder_repetition_penalty": [2.0, 0.5],
    "encoder_no_repeat_ngram_size": [1, 2],
    "sequence_bias": [[[[3], 5.0], [[4, 5], 9.0], [[9, 5], 4.0]], [[[7], -3.0]]],
    "exponential_decay_length_penalty": [(2, 1.5), (0, 1.1)],
    "remove_invalid_values": [True],
}
# With these, scores are infinite or all removed, and transformers takes a token of a NaN or of a tie.
REMOVING_SETTINGS = {
    "min_length",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "remove_invalid_values",
}
SAMPLING_VALUES = {
    "temperature": [0.5, 1.7],
    "top_k": [1, 3, 8],
    "top_p": [0.0, 0.3, 0.9],
    "min_p": [0.05, 0.3],
    "typical_p": [0.2, 0.9],
    "epsilon_cutoff": [0.01, 0.1],
    "eta_cutoff": [0.01, 0.2],
    "repetition_penalty": [1.5],
    "renormalize_logits": [True],
}


@pytest.fixture(scope="module")
def torch_model():
    from fake_transformers_model import TorchFake

    return TorchFake(VOCAB)


def draw_settings(rng: random.Random, beams: bool) -> dict | None:
    """Settings drawn together; None for a draw that leaves the choice to chance."""
    options = {
        name: rng.choice(SETTING_VALUES[name]) for name in rng.sample(sorted(SETTING_VALUES), rng.choice([1, 2, 3, 4]))
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
def test_texts_scores_and_log_probabilities_are_those_of_transformers(torch_model, seed, beams):
    rng = random.Random(f"{seed} {beams}")
    options = next(filter(None, iter(lambda: draw_settings(rng, beams), "never")))
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 7, 12]))] for _ in range(3)]
    gen = compile_fake(
        3, fake={"by_length": seed % 2 == 1, "runs_ahead": seed % 3 == 1}, token_logprobs=True, **options
    )
    for prompt, result in zip(prompts, run_batch(gen, prompts)[1], strict=True):
        ((tokens, logprobs, score),) = torch_model.texts(prompt, **options)
        assert [token.id for token in result.tokens] == tokens, (prompt, options)
        np.testing.assert_allclose([token.logprob for token in result.tokens], logprobs, atol=1e-4)
        if beams:
            assert result.score == pytest.approx(score, abs=1e-4)
        else:
            plain = greedy(lambda tokens: logits_after(tokens, VOCAB), prompt, **options)
            assert plain[0] == tokens
            np.testing.assert_allclose(plain[1], logprobs, atol=1e-4)


@pytest.mark.parametrize("name", SETTING_VALUES)
def test_each_setting_alone_is_that_of_transformers(torch_model, name):
    for value in SETTING_VALUES[name]:
        options = {name: value, "max_new_tokens": 8, "eos_token_id": [1, 2]}
        prompts = [[3], [4, 5, 3, 4, 5, 6], [9, 9]]
        found = run_batch(compile_fake(3, **options), prompts)[1]
        expected = [torch_model.texts(prompt, **options)[0][0] for prompt in prompts]
        assert [[token.id for token in result.tokens] for result in found] == expected


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_the_scores_that_sampling_draws_from_are_those_of_transformers(torch_model, seed, beams):
    import torch

    rng = random.Random(f"{seed} {beams}")
    options = {"do_sample": True, "top_k": 0, "num_beams": beams, "eos_token_id": [1, 2], "max_new_tokens": 1}
    options |= {
        name: rng.choice(SAMPLING_VALUES[name]) for name in rng.sample(sorted(SAMPLING_VALUES), rng.choice([1, 2, 4]))
    }
    torch.manual_seed(0)
    prompt = [rng.randrange(VOCAB) for _ in range(3)]
    out = torch_model.generate(
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


def test_a_greedy_text_that_a_nan_ends_is_that_of_transformers(torch_model):
    """min_length removes the eos and the decay adds infinity to it: transformers takes the NaN, and so do we."""
    options = {"max_new_tokens": 9, "eos_token_id": 1, "min_length": 20, "exponential_decay_length_penalty": (2, 1.5)}
    expected = torch_model.texts([3, 4], **options)[0][0]
    assert [token.id for token in run_batch(compile_fake(1, **options), [[3, 4]])[1][0].tokens] == expected
    assert len(expected) == 3


def test_several_texts_of_beams_are_those_of_transformers(torch_model):
    options = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "max_new_tokens": 7,
        "eos_token_id": [1, 2],
        "length_penalty": 0.5,
    }
    found = run_batch(compile_fake(1, **options), [[3, 4, 5]])[1]
    expected = torch_model.texts([3, 4, 5], **options)
    assert [[token.id for token in result.tokens] for result in found] == [tokens for tokens, _, _ in expected]
    np.testing.assert_allclose([result.score for result in found], [score for _, _, score in expected], atol=1e-4)
