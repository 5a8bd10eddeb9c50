"""Beam search: against every possible sequence, its rows and forks, and several prompts at once."""

from __future__ import annotations

import numpy as np
import pytest
from fake_decoder import logits_after
from fake_generation import compile_fake, generated_ids, run_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loops import score_all_sequences
from setting_strategies import VOCAB

from mlx_transmuter.generation.beam_stop_rule import length_penalized
from mlx_transmuter.generation.logits.token_selection import BeamCandidates
from mlx_transmuter.generation.prompt_beams import PromptBeams
from mlx_transmuter.generation.settings import resolve_settings
from mlx_transmuter.generation.stop_rules import StopRules


def as_tuples(found) -> list[tuple[list[int], str, float]]:
    return [([token.id for token in result.tokens], result.finish_reason, result.score) for result in found]


@settings(max_examples=25)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    salt=st.integers(0, 10**6),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    extra=st.sampled_from(
        [{}, {"repetition_penalty": 1.4}, {"bad_words_ids": [[0, 1], [2, 2]]}, {"no_repeat_ngram_size": 2}]
    ),
)
def test_a_search_with_as_many_beams_as_sequences_finds_the_best_one(prompt, salt, penalty, extra):
    options = {"max_new_tokens": 3, "eos_token_id": 2, "length_penalty": penalty, **extra}
    best = score_all_sequences(lambda tokens: logits_after(tokens, 3, salt), prompt, 3, **options)
    gen = compile_fake(1, fake={"vocab": 3, "salt": salt}, num_beams=9, early_stopping="never", **options)
    (found,) = as_tuples(run_batch(gen, [prompt])[1])
    score, text = best[0]
    # With a penalty of at most 0 the rule of `_check_early_stop_heuristic` may stop before the best sequence.
    if penalty > 0:
        assert found[0] == [token for token in text if token != 2]
        assert found[2] == pytest.approx(score, abs=1e-4)
    scores = {tuple(t for t in text if t != 2): score for score, text in best}
    assert found[2] == pytest.approx(scores[tuple(found[0])], abs=1e-4)


def test_several_hypotheses_are_sorted_by_score_and_differ():
    gen = compile_fake(2, num_beams=4, num_return_sequences=3, max_new_tokens=6, eos_token_id=[0, 1])
    found = as_tuples(run_batch(gen, [[3, 4], [5]])[1])
    assert len(found) == 6
    for prompt in (found[:3], found[3:]):
        assert [score for _, _, score in prompt] == sorted((score for _, _, score in prompt), reverse=True)
        assert len({tuple(tokens) for tokens, _, _ in prompt}) == 3


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("by_length", [False, True])
def test_a_ragged_batch_gives_each_prompt_what_it_gets_alone(early, by_length):
    prompts = [[3, 4, 5], [6], [], [7, 8, 9, 3, 3, 3, 4], [5]]
    options = {
        "num_beams": 3,
        "early_stopping": early,
        "max_new_tokens": 9,
        "eos_token_id": [0, 1, 2],
        "token_logprobs": True,
    }
    options |= {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2}
    batched = run_batch(compile_fake(5, fake={"by_length": by_length}, **options), prompts)[1]
    single = [run_batch(compile_fake(1, **options), [prompt])[1][0] for prompt in prompts]
    assert batched == single


def test_a_prompt_runs_once_and_its_beams_fork_without_copies():
    gen = compile_fake(2, num_beams=3, max_new_tokens=6)
    run_batch(gen, [[3] * 13, [4, 5]])
    (session,) = gen.decoder.sessions
    assert session.paged
    assert session.copied_slots == 0
    assert session.closed
    assert session.steps[:3] == [(8, [8, 0, 0, 2, 0, 0]), (4, [4, 0, 0, 0, 0, 0]), (1, [1, 0, 0, 0, 0, 0])]
    assert session.steps[3:] == [(1, [1] * 6)] * 5


def test_a_stopped_prompt_pads_until_all_stop():
    gen = compile_fake(2, num_beams=2, max_new_tokens=12, eos_token_id=[0, 1, 2, 3, 4], early_stopping=True)
    run_batch(gen, [[5, 6], [6, 7, 9]])
    counts = [counts for _, counts in gen.decoder.sessions[0].steps[2:]]
    assert [1, 1, 0, 0] in counts or [0, 0, 1, 1] in counts
    assert all(counts[i] == counts[i + 1] for counts in counts for i in (0, 2))


def test_a_hypothesis_ends_at_the_limit_or_at_an_eos():
    gen = compile_fake(1, num_beams=2, max_new_tokens=3)
    ((tokens, reason, _),) = as_tuples(run_batch(gen, [[3]])[1])
    assert (len(tokens), reason) == (3, "length")
    gen = compile_fake(1, num_beams=2, max_new_tokens=30, eos_token_id=[0, 1, 2, 3])
    ((tokens, reason, _),) = as_tuples(run_batch(gen, [[3]])[1])
    assert len(tokens) < 30
    assert reason == "stop"


def test_a_hypothesis_that_stop_ends_keeps_its_last_token():
    gen = compile_fake(1, num_beams=3, max_new_tokens=8)
    lengths = []

    def stop(tokens):
        lengths.append(len(tokens))
        return len(tokens) == 4

    ((tokens, reason, _),) = as_tuples(run_batch(gen, [[3]], stop=[stop])[1])
    assert (len(tokens), reason) == (4, "stop")
    assert set(lengths) == {1, 2, 3, 4}


def test_steps_report_the_tokens_of_the_results():
    gen = compile_fake(3, num_beams=3, max_new_tokens=7, eos_token_id=[0, 1, 2, 3], token_logprobs=True)
    steps, found = run_batch(gen, [[3], [], [4, 5]])
    for text, result in enumerate(found):
        reported = [(int(step.token[text]), float(step.logprob[text])) for step in steps if step.token[text] >= 0]
        assert [token for token, _ in reported] == [token.id for token in result.tokens]
        np.testing.assert_allclose([logprob for _, logprob in reported], [t.logprob for t in result.tokens], rtol=1e-6)
    assert steps[-1].finished.all()
    assert all(step.finished[1] for step in steps)


def test_a_removed_token_has_the_smallest_score_and_no_score_goes_below_it():
    """With fewer tokens left than beams, the search continues with removed ones, and its sums stay finite."""
    everything = [token for token in range(VOCAB) if token != 5]
    gen = compile_fake(1, num_beams=4, num_return_sequences=4, max_new_tokens=5, suppress_tokens=everything)
    found = as_tuples(run_batch(gen, [[3]])[1])
    assert found[0][0] == [5] * 5
    assert all(np.isfinite(score) for _, _, score in found)


def candidates(*scores: float, tokens: list[int]) -> BeamCandidates:
    return BeamCandidates([0] * len(tokens), tokens, np.array(scores, np.float32), None)


def prompt_with_two_beams(**options) -> PromptBeams:
    settings = resolve_settings({}, {"num_beams": 2, "eos_token_id": 0, **options})
    return PromptBeams(settings, 9, StopRules(frozenset(settings.eos_token_id)))


@pytest.mark.parametrize(("early", "done"), [(True, True), (False, True), ("never", False)])
def test_the_stop_rule_of_a_prompt(early, done):
    """Hypotheses of -1 and -1.5 end at once. The best beam has -4: no better now, but -0.44 per token if it reached 9
    tokens."""
    beams = prompt_with_two_beams(early_stopping=early)
    beams.take_candidates(candidates(-1, -1.5, -4, -5, tokens=[0, 0, 1, 2]))
    assert beams.is_done is done
    assert [text.tokens for text in beams.best_hypotheses()] == [(0,)]


@pytest.mark.parametrize(("early", "done"), [(True, True), (False, False), ("never", False)])
def test_early_stopping_ends_a_prompt_that_could_improve(early, done):
    beams = prompt_with_two_beams(early_stopping=early)
    beams.take_candidates(candidates(-3, -3.5, -1, -5, tokens=[0, 0, 1, 2]))
    assert beams.is_done is done


def test_a_longer_hypothesis_wins_by_its_length_penalty():
    for penalty, winner in ((0.0, (0,)), (2.0, (1, 0))):
        beams = prompt_with_two_beams(early_stopping="never", length_penalty=penalty)
        beams.take_candidates(candidates(-1, -1.2, -4, -5, tokens=[0, 1, 2, 3]))
        beams.take_candidates(candidates(-1.5, -3, -4, -5, tokens=[0, 1, 2, 3]))
        assert beams.best_hypotheses()[0].tokens == winner


def test_only_the_first_num_beams_candidates_become_finished_hypotheses():
    beams = prompt_with_two_beams(eos_token_id=[0, 1])
    beams.take_candidates(candidates(-1, -2, -3, -4, -5, -6, tokens=[2, 3, 0, 1, 4, 5]))
    assert [text.is_complete for text in beams.finished_hypotheses] == [False, False]
    assert [text.tokens for text in beams.running_beams] == [(2,), (3,)]


@pytest.mark.parametrize("minimum", [{"min_length": 9}, {"min_new_tokens": 7}])
def test_beams_end_after_the_minimum_under_exponential_decay_and_a_greedy_row_at_its_start(minimum):
    options = {"eos_token_id": 1, "max_new_tokens": 12, "exponential_decay_length_penalty": (2, 1.5), **minimum}
    (greedy,), (beams,) = (generated_ids(1, [[3, 4]], num_beams=count, **options) for count in (1, 3))
    assert len(greedy) == 3
    assert len(beams) >= 7


@pytest.mark.parametrize("penalty", [2.0**62, -(2.0**62), 200.0, -200.0])
def test_a_length_penalty_beyond_float32_is_infinite_or_zero(penalty):
    scores = length_penalized(np.array([-1.0, -2.5], np.float32), 3, penalty)
    expected = 0 if penalty > 0 else np.finfo(np.float32).min
    np.testing.assert_array_equal(scores, np.float32([expected] * 2))
