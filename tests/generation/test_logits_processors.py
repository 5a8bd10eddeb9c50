"""Every processor against the reference loops, for random rows of a ragged batch and at the lengths where it ends."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from fake_generation import compile_fake, fake_model, run_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loops import process_scores, warp_scores
from setting_strategies import EDGE_PROCESSOR_SETTINGS, EDGE_SAMPLING_SETTINGS, EOS, SMALL_TOKEN, VOCAB

from mlx_transmuter.generation import GenerationError, context
from mlx_transmuter.generation.logits.host_processor_inputs import HostProcessorInputs
from mlx_transmuter.generation.logits.processor_state import ProcessorInputs
from mlx_transmuter.generation.logits.token_selection import TokenSelection, row_random_keys

SEQUENCE = st.tuples(st.lists(SMALL_TOKEN, min_size=1, max_size=5), st.lists(SMALL_TOKEN, max_size=5))


def random_scores(rows: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * 3).astype(np.float32)


def compiled_scores(options: dict, sequences: list[tuple[list[int], list[int]]], scores: np.ndarray) -> np.ndarray:
    """Returns the processed scores of each sequence, a prompt and its new tokens, after steps with these tokens."""
    ctx = context(fake_model(), **options)
    selection = TokenSelection(ctx.settings, VOCAB, ctx.processors)
    prompts = [prompt for prompt, _ in sequences]
    ends = [len(prompt) + ctx.new_token_limit(len(prompt)) for prompt in prompts]
    keys = row_random_keys([0] * len(sequences), 1) if ctx.settings.do_sample else []
    state, fixed = selection.initial_state(ProcessorInputs(prompts, prompts, ends, keys))
    host = HostProcessorInputs(selection, prompts, prompts)
    rows = mx.arange(len(sequences), dtype=mx.int32)
    (length,) = {len(new) for _, new in sequences}
    host_arrays = host.arrays_for(prompts)
    for at in range(length):
        state = selection.fork_state(state, rows, mx.array([new[at] for _, new in sequences], dtype=mx.int32))
        host_arrays = host.arrays_for([prompt + new[: at + 1] for prompt, new in sequences])
    return np.array(selection.process_scores(mx.array(scores), state, fixed | host_arrays))


def check_against_reference(options: dict, sequences: list[tuple[list[int], list[int]]], seed: int) -> None:
    scores = random_scores(len(sequences), seed)
    found = compiled_scores(options, sequences, scores)
    for row, (prompt, new) in enumerate(sequences):
        with np.errstate(invalid="ignore", over="ignore"):
            expected = process_scores(scores[row], prompt, new, **options)
        if "exponential_decay_length_penalty" in options:  # -inf + inf of a removed eos, which argmax takes in torch
            expected = np.where(np.isnan(expected), np.inf, expected)
        np.testing.assert_allclose(found[row], expected, rtol=2e-5, atol=2e-5, err_msg=f"row {row}: {prompt} {new}")


def cut_to_same_length(sequences: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int]]]:
    shortest = min(len(new) for _, new in sequences)
    return [(prompt, new[:shortest]) for prompt, new in sequences]


@pytest.mark.parametrize("name", EDGE_PROCESSOR_SETTINGS)
@settings(max_examples=60)
@given(data=st.data(), sequences=st.lists(SEQUENCE, min_size=1, max_size=3), eos=EOS, seed=st.integers(0, 99))
def test_a_processor_alone(name, data, sequences, eos, seed):
    options = {
        "max_new_tokens": data.draw(st.integers(1, 6)),
        name: data.draw(EDGE_PROCESSOR_SETTINGS[name]),
        "eos_token_id": eos,
    }
    if "bad_words_ids" in options:
        options["eos_token_id"] = 15
    check_against_reference(options, cut_to_same_length(sequences), seed)


@settings(max_examples=150)
@given(data=st.data(), sequences=st.lists(SEQUENCE, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_processors_apply_in_their_order(data, sequences, seed):
    names = data.draw(st.lists(st.sampled_from(sorted(EDGE_PROCESSOR_SETTINGS)), min_size=2, max_size=6, unique=True))
    options = {name: data.draw(EDGE_PROCESSOR_SETTINGS[name]) for name in names}
    check_against_reference(
        {**options, "max_new_tokens": 6, "eos_token_id": [15, 14]}, cut_to_same_length(sequences), seed
    )


def test_only_the_first_row_of_each_prompt_gets_the_encoder_penalty():
    ctx = context(fake_model(), num_beams=2, encoder_repetition_penalty=2.0)
    selection = TokenSelection(ctx.settings, VOCAB)
    prompts = [[1, 2], [1, 2], [3], [3]]
    state, fixed = selection.initial_state(ProcessorInputs(prompts, prompts, [9] * 4))
    changed = np.array(selection.process_scores(mx.ones((4, VOCAB)), state, fixed)) != 1
    assert [np.flatnonzero(row).tolist() for row in changed] == [[1, 2], [], [3], []]


def test_custom_processors_apply_after_the_settings_and_before_sampling():
    views = []

    def make_state(row):
        views.append(row)
        return np.full(VOCAB, len(row["generated"]), np.float64)

    def process(logits, array):
        # It gets the scores after the penalty, and top_k leaves the token that it raises.
        return mx.where(mx.arange(VOCAB) == 5, logits[3] * 0 + 50 + array[0], logits)

    options = {"repetition_penalty": 2.0, "do_sample": True, "top_k": 1, "max_new_tokens": 9}
    found = compiled_scores({**options, "processors": [(make_state, process)]}, [([3, 4], [6, 7])], random_scores(1, 0))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [5]
    assert found[0][5] == 52
    assert views[0] == {"prompt": [3, 4], "generated": [], "vocab": VOCAB}
    assert views[-1]["generated"] == [7, 6]


def test_a_custom_processor_gets_the_scores_after_the_settings():
    processed = []

    def process(logits, array):
        processed.append(np.array(logits))
        return logits

    scores = random_scores(1, 1)
    options = {"suppress_tokens": [2], "repetition_penalty": 1.5, "max_new_tokens": 5}
    compiled_scores({**options, "processors": [(lambda row: np.zeros(1), process)]}, [([3, 4], [])], scores)
    np.testing.assert_allclose(processed[-1], process_scores(scores[0], [3, 4], [], **options), rtol=1e-6)


def keep_logits(logits, array):
    return logits


def zero_state(row):
    return np.zeros(1)


@pytest.mark.parametrize("processors", ["x", b"xy", 3, None, {zero_state: keep_logits}])
def test_processors_that_are_no_list_are_an_error(processors):
    with pytest.raises(GenerationError, match=r"processors: found .*; expected a list, each entry a pair"):
        context(fake_model(), processors=processors)


@pytest.mark.parametrize("entry", [3, "xy", None, (zero_state,), (zero_state, 3), (None, keep_logits)])
def test_a_processor_that_is_no_pair_of_functions_is_an_error(entry):
    with pytest.raises(GenerationError, match=r"processor 1: found .*; expected a pair of functions"):
        context(fake_model(), processors=[(zero_state, keep_logits), entry])


@pytest.mark.parametrize("state", ["text", None, ["a"], [[1], [1, 2]], object()])
def test_a_state_that_is_no_array_of_numbers_is_an_error(state):
    with pytest.raises(GenerationError, match=r"processor 0: found a state .*; expected an array of numbers"):
        compiled_scores({"processors": [(lambda row: state, keep_logits)]}, [([3], [])], random_scores(1, 0))


@pytest.mark.parametrize(
    "result",
    [lambda logits: logits[:5], lambda logits: logits[None], lambda logits: None, lambda logits: [0.0] * VOCAB],
)
def test_a_result_that_is_no_row_of_logits_is_an_error(result):
    gen = compile_fake(1, processors=[(zero_state, lambda logits, array: result(logits))])
    with pytest.raises(GenerationError, match=r"processor 0: found a result .*; expected logits of shape \(16,\)"):
        run_batch(gen, [[3]])


def test_a_state_that_changes_its_shape_is_an_error():
    options = {"processors": [(lambda row: np.zeros(len(row["generated"]) + 1), lambda logits, array: logits)]}
    with pytest.raises(GenerationError, match="shape"):
        compiled_scores(options, [([3], [4])], random_scores(1, 0))


@settings(max_examples=250)
@given(data=st.data(), beams=st.sampled_from([1, 1, 2]), eos=EOS, seed=st.integers(0, 999))
def test_sampling_settings(data, beams, eos, seed):
    names = data.draw(st.lists(st.sampled_from(sorted(EDGE_SAMPLING_SETTINGS)), min_size=1, max_size=4, unique=True))
    options = {"do_sample": True, "top_k": 0, **{name: data.draw(EDGE_SAMPLING_SETTINGS[name]) for name in names}}
    options |= {"num_beams": beams, "eos_token_id": eos}
    scores = random_scores(3, seed)
    found = compiled_scores(options, [([1], [])] * 3, scores)
    for row in range(3):
        expected = process_scores(scores[row], [1], [], **options)
        if _near_a_threshold(scores[row], options):
            continue
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-5)


def _near_a_threshold(scores: np.ndarray, options: dict) -> bool:
    """Returns whether another float32 sum could leave other tokens: which ones remain changes with noise on the scores."""
    keep = 1 if options["num_beams"] == 1 else max(2, 1 + len(np.atleast_1d(options["eos_token_id"])))
    remaining = {
        tuple(np.isfinite(warp_scores(scores * np.float32(factor), keep, **options)))
        for factor in (1 - 1e-5, 1, 1 + 1e-5)
    }
    shifted = {
        tuple(np.isfinite(warp_scores(scores, keep, **{**options, name: options[name] * factor})))
        for name in EDGE_SAMPLING_SETTINGS.keys() & options.keys() - {"top_k"}
        if options[name]
        for factor in (1 - 1e-5, 1 + 1e-5)
    }
    return len(remaining | shifted) > 1


def test_top_k_keeps_all_ties_of_the_last():
    found = compiled_scores(
        {"do_sample": True, "top_k": 2}, [([1], [])], np.array([[1, 3, 3, 3, 2] + [0] * 11], np.float32)
    )
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == [1, 2, 3]


@pytest.mark.parametrize("beams", [1, 2])
def test_top_p_of_0_keeps_one_token_and_enough_for_beams(beams):
    found = compiled_scores(
        {"do_sample": True, "top_k": 0, "top_p": 0.0, "num_beams": beams}, [([1], [])], random_scores(1, 3)
    )
    assert np.isfinite(found[0]).sum() == beams


def test_a_half_precision_logit_is_processed_as_float32():
    ctx = context(fake_model(), repetition_penalty=1.1, token_logprobs=True)
    selection = TokenSelection(ctx.settings, VOCAB, logprobs=True)
    state, fixed = selection.initial_state(ProcessorInputs([[1]], [[1]], [9]))
    packed, _ = selection.select_tokens(mx.array(random_scores(1, 0)).astype(mx.float16), state, fixed)
    assert packed.dtype == mx.int32
    half = random_scores(1, 0).astype(np.float16).astype(np.float32)[0]
    expected = process_scores(half, [1], [], repetition_penalty=1.1, renormalize_logits=True)
    assert int(packed[0, 0]) == int(expected.argmax())
    assert abs(float(np.array(packed)[:, 1].view(np.float32)[0]) - expected.max()) < 1e-6
