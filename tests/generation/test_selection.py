"""The selection of a step: its one array, sampled frequencies, keys, and what is compiled."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fake_decoder import logits_after
from fake_generation import compile_fake, fake_model, generated_ids, run_batch
from reference_loops import log_softmax, process_scores, softmax
from setting_strategies import VOCAB

from mlx_transmuter import generation
from mlx_transmuter.generation.logits.host_processor_inputs import HostProcessorInputs
from mlx_transmuter.generation.logits.processor_state import ProcessorInputs
from mlx_transmuter.generation.logits.token_selection import BeamCandidates, TokenSelection, row_random_keys

# The 0.999 quantiles of the chi-square distribution by its degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 15: 37.70}


def chi_square(counts: np.ndarray, masses: np.ndarray) -> float:
    """Pearson's statistic over the tokens of a mass that is not 0; a draw of another token makes it infinite."""
    expected = counts.sum() * masses
    possible = masses > 0
    return (
        np.inf
        if counts[~possible].any()
        else float(((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum())
    )


def sample_once_per_seed(logits: np.ndarray, seeds: list[int], **options) -> np.ndarray:
    """Returns one token for each seed, all from the same logits."""
    ctx = generation.context(fake_model(), do_sample=True, **options)
    selection = TokenSelection(ctx.settings, len(logits))
    rows = [[1]] * len(seeds)
    state, fixed = selection.initial_state(ProcessorInputs(rows, rows, [99] * len(seeds), row_random_keys(seeds, 1)))
    selected_tokens, _ = selection.select_tokens(mx.array(np.tile(logits, (len(seeds), 1))), state, fixed)
    return np.array(selected_tokens)[:, 0]


SAMPLING = [
    {"top_k": 0},
    {"top_k": 0, "temperature": 2.5},
    {"top_k": 5},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": 0, "min_p": 0.2},
]


@pytest.mark.parametrize("options", SAMPLING)
def test_sampled_tokens_have_the_frequencies_of_the_processed_scores(options):
    logits = np.linspace(-2, 2, VOCAB).astype(np.float32)
    masses = softmax(process_scores(logits, [1], [], do_sample=True, **options))
    counts = np.bincount(sample_once_per_seed(logits, list(range(4000)), **options), minlength=VOCAB)
    assert chi_square(counts, masses) < CHI_SQUARE[int((masses > 0).sum()) - 1]


def test_the_draws_of_one_seed_are_as_independent_as_those_of_many():
    """The sequence of one seed has the frequencies of many seeds, and neighbors are independent."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    ctx = generation.context(fake_model(), do_sample=True, top_k=0)
    selection = TokenSelection(ctx.settings, 3)
    state, fixed = selection.initial_state(ProcessorInputs([[1]], [[1]], [99], row_random_keys([11], 1)))
    draws = []
    for _ in range(3000):
        selected_tokens, state = selection.select_tokens(mx.array(logits[None]), state, fixed)
        draws.append(int(selected_tokens[0, 0]))
    assert chi_square(np.bincount(draws, minlength=3), softmax(logits)) < CHI_SQUARE[2]
    pairs = np.bincount(np.array(draws[:-1:2]) * 3 + np.array(draws[1::2]), minlength=9)
    assert chi_square(pairs, np.outer(softmax(logits), softmax(logits)).ravel()) < 26.12  # 8 degrees of freedom


def test_seeds_of_any_size_and_sign_differ():
    logits = np.zeros(1000, np.float32)
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63, -(2**63) + 5]
    assert len(set(sample_once_per_seed(logits, seeds, top_k=0).tolist())) == len(seeds)
    np.testing.assert_array_equal(
        sample_once_per_seed(logits, seeds, top_k=0), sample_once_per_seed(logits, seeds, top_k=0)
    )


def test_a_row_is_the_same_alone_and_in_any_batch():
    prompts = [[1, 2, 3], [4], [5, 6], [], [7] * 9]
    seeds = [3, 5, 3, 7, 11]
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12, "eos_token_id": [0, 1]}
    batched = generated_ids(5, prompts, seeds, **options)
    assert batched == [
        generated_ids(1, [prompt], [seed], **options)[0] for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert batched[::-1] == generated_ids(5, prompts[::-1], seeds[::-1], **options)
    assert batched != generated_ids(5, prompts, [seed + 1 for seed in seeds], **options)


def test_several_sequences_of_a_prompt_differ_and_are_the_same_alone():
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 8, "num_return_sequences": 3}
    batched = generated_ids(2, [[1, 2], [3]], [5, 6], **options)
    assert len({tuple(text) for text in batched}) == 6
    assert batched == generated_ids(1, [[1, 2]], [5], **options) + generated_ids(1, [[3]], [6], **options)


def test_sampled_beams_draw_without_replacement_from_the_sums():
    """The first draw of the candidates has the frequencies of the softmax of the sums, the second those that remain."""
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    ctx = generation.context(fake_model(), do_sample=True, top_k=0, num_beams=2)
    count, prompts = 4, 4000
    selection = TokenSelection(ctx.settings, count)
    rows = [[1]] * 2 * prompts
    state, fixed = selection.initial_state(
        ProcessorInputs(rows, rows, [99] * 2 * prompts, row_random_keys(range(prompts), 1))
    )
    scores = mx.array(np.tile(np.array([0, -1e9], np.float32), prompts))
    selected_candidates, _ = selection.select_candidates(
        mx.array(np.tile(logits, (2 * prompts, 1))), state, fixed, scores
    )
    read = [selection.read_candidates(row) for row in np.array(selected_candidates)]
    found = [candidates for candidates in read if isinstance(candidates, BeamCandidates)]
    assert len(found) == prompts
    firsts = np.array([tokens[0] for _, tokens, *_ in found])
    assert all(beams[:3] == [0, 0, 0] and len(set(tokens)) == 4 for beams, tokens, *_ in found)
    masses = softmax(logits)
    assert chi_square(np.bincount(firsts, minlength=count), masses) < CHI_SQUARE[3]
    seconds = np.array([tokens[1] for _, tokens, *_ in found])[firsts == 0]
    assert chi_square(np.bincount(seconds, minlength=count), np.array([0, 0.5, 0.3, 0.2])) < CHI_SQUARE[2]


def test_log_probabilities_are_computed_only_when_asked_for():
    for with_logprobs, width in ((False, 1), (True, 2)):
        gen = compile_fake(1, token_logprobs=with_logprobs, max_new_tokens=3)
        state, fixed = gen.selection.initial_state(ProcessorInputs([[1]], [[1]], [4]))
        selected_tokens, _ = gen.selection.select_tokens(mx.zeros((1, VOCAB)), state, fixed)
        assert selected_tokens.shape == (1, width)
        assert selected_tokens.dtype == mx.int32
        _, (result,) = run_batch(gen, [[1]])
        assert all((token.logprob is not None) == with_logprobs for token in result.tokens)


def test_log_probabilities_of_sampling_are_those_of_the_scores_it_draws_from():
    options = {"do_sample": True, "temperature": 0.7, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2}
    gen = compile_fake(1, token_logprobs=True, max_new_tokens=10, **options)
    _, (result,) = run_batch(gen, [[3, 4]], [9])
    new: list[int] = []
    for token in result.tokens:
        scores = process_scores(logits_after([3, 4, *new], VOCAB), [3, 4], new, max_new_tokens=10, **options)
        assert abs(token.logprob - log_softmax(scores)[token.id]) < 1e-5
        new.append(token.id)


def test_nothing_of_the_size_of_the_vocabulary_comes_from_the_host():
    options = {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 3, "bad_words_ids": [[5], [6, 7]]}
    options |= {"repetition_penalty": 1.2, "suppress_tokens": [1, 2]}
    ctx, vocab = generation.context(fake_model(), **options), 50_000
    prompts = [[5, 6, 5, 7, 5], [9]]
    selection = TokenSelection(ctx.settings, vocab)
    host = HostProcessorInputs(selection, prompts, prompts)
    host.arrays_for([[*prompts[0], 8], [9, 4]])
    arrays = host.arrays_for([[*prompts[0], 8, 5], [9, 4, 9]])
    assert {name: sorted(np.array(a)[0].tolist()) for name, a in arrays.items()} == {"banned_ids": [6, 7, 8, vocab]}
    state, fixed = selection.initial_state(ProcessorInputs(prompts, prompts, [9, 9]))
    assert {name: array.dtype for name, array in state.items() if array.size >= vocab} == {"seen_tokens": mx.bool_}
    assert fixed == {}


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}])
def test_compiled_and_uncompiled_give_the_same(compiling, options):
    options |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "token_logprobs": True, "max_new_tokens": 8}
    options |= {"eos_token_id": [0, 1], "bad_words_ids": [[3, 4], [5]], "temperature": 1.5}
    found = run_batch(compile_fake(2, **options), [[1, 2, 3], [4]])[1]
    mx.disable_compile()
    plain = run_batch(compile_fake(2, **options), [[1, 2, 3], [4]])[1]
    assert [[token.id for token in result.tokens] for result in found] == [
        [t.id for t in result.tokens] for result in plain
    ]
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_allclose([t.logprob for t in one.tokens], [t.logprob for t in other.tokens], atol=1e-5)


def test_the_selection_is_traced_once_per_shape(compiling):
    traced = []

    def process(logits, array):
        traced.append(logits.shape)
        return logits + array

    gen = compile_fake(2, processors=[(lambda row: np.zeros(1), process)], max_new_tokens=20, repetition_penalty=1.1)
    run_batch(gen, [[1, 2, 3], [4]])
    run_batch(gen, [[1, 2, 3, 5, 6], [4, 4]])
    assert len(traced) == 2  # once for each row
