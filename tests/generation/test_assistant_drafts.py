"""An assistant model: results are those of plain decoding whatever it drafts; all drafts of the model itself are
accepted."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_generation import compile_fake, fake_model, results_with_errors, run_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from setting_strategies import VOCAB
from test_speculative_decoding import EOS_TOKEN_IDS, OPTIONS, PROMPTS, SAMPLING, assert_same_results

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError

# The model itself, another one, one of a short context, and one of few positions.
ASSISTANT_FAKES = [{}, {"salt": 1}, {"memory": 2}, {"max_positions": 9}]


@settings(max_examples=80)
@given(
    prompts=PROMPTS,
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    sampling=st.none() | st.fixed_dictionaries({"do_sample": st.just(True)}, optional=SAMPLING),
    assistant=st.sampled_from(ASSISTANT_FAKES),
    max_draft_tokens=st.sampled_from([1, 3, 6]),
    threshold=st.sampled_from([0.0, 0.3, 0.9]),
    positions=st.sampled_from([None, None, 12]),
)
def test_results_are_those_of_plain_decoding(
    prompts, options, sampling, assistant, max_draft_tokens, threshold, positions
):
    options = {
        **options,
        **(sampling or {}),
        "max_new_tokens": 11,
        "eos_token_id": EOS_TOKEN_IDS,
        "token_logprobs": True,
    }
    fake, seeds = {"max_positions": positions}, list(range(len(prompts)))
    plain = results_with_errors(compile_fake(len(prompts), fake=fake, **options), prompts, seeds)
    drafting = {"num_assistant_tokens": max_draft_tokens, "assistant_confidence_threshold": threshold}
    gen = compile_fake(len(prompts), fake=fake, assistant=assistant, **drafting, **options)
    found = results_with_errors(gen, prompts, seeds)
    assert_same_results(found, plain)
    assert all(session.closed for session in gen.assistant.decoder.sessions)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 2}])
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}])
def test_all_drafts_of_a_model_that_drafts_for_itself_are_accepted(options, more):
    """Under sampling too: it draws with the model's own keys."""
    gen = compile_fake(
        2,
        assistant={},
        num_assistant_tokens=4,
        assistant_confidence_threshold=0.0,
        max_new_tokens=21,
        **options,
        **more,
    )
    _, found = run_batch(gen, [[3, 4, 5], [6]], [1, 2])
    for result in found:
        assert len(result.tokens) == 21
        assert result.draft_counts == (4, 16, 16)
    (own,), (other,) = gen.decoder.sessions, gen.assistant.decoder.sessions
    assert own.draft_sizes == [5] * 4
    # The prompt and its first token, then in each pass what it lacks (the last draft token and the token after it); and
    # three of four draft tokens.
    assert [seq for seq, _ in other.steps] == [4, 1, 1, 1] + [2, 1, 1, 1] * 3


def test_rejected_drafts_are_truncated_and_not_read_again():
    gen = compile_fake(
        1, assistant={"salt": 1}, num_assistant_tokens=3, assistant_confidence_threshold=0, max_new_tokens=12
    )
    _, (result,) = run_batch(gen, [[3, 4, 5, 6, 7]])
    (session,) = gen.assistant.decoder.sessions
    assert result.draft_counts.accepted < 3
    accepted = result.draft_counts.accepted
    read = sum(count for _, (count,) in session.steps)
    # Each pass reads one token of the row, and its draft tokens but the last.
    assert read <= 5 + result.draft_counts.passes + accepted + 2 * result.draft_counts.passes


def test_an_assistant_below_its_confidence_threshold_drafts_nothing():
    gen = compile_fake(1, assistant={}, num_assistant_tokens=3, assistant_confidence_threshold=1.0, max_new_tokens=6)
    _, (result,) = run_batch(gen, [[3, 4]])
    assert (len(result.tokens), result.draft_counts) == (6, (5, 0, 0))
    assert gen.decoder.sessions[0].draft_sizes == [1] * 5


def test_an_assistant_of_few_positions_drafts_as_far_as_they_go():
    gen = compile_fake(
        1, assistant={"max_positions": 8}, num_assistant_tokens=4, assistant_confidence_threshold=0, max_new_tokens=20
    )
    _, (result,) = run_batch(gen, [[3, 4]])
    assert len(result.tokens) == 20
    assert len(gen.assistant.decoder.sessions[0].tokens[0]) <= 8
    assert result.draft_counts.accepted > 0
    assert run_batch(gen, [[3] * 12])[1][0].draft_counts.proposed == 0


def test_cancelling_while_the_assistant_reads_the_prompt():
    cancel = threading.Event()
    gen = compile_fake(1, assistant={}, max_new_tokens=9)
    begin = gen.assistant.decoder.begin_session

    def begin_cancelling(*args, **more):
        session = begin(*args, **more)
        step = session.step
        session.step = lambda *args: (cancel.set(), step(*args))[1]
        return session

    gen.assistant.decoder.begin_session = begin_cancelling
    _, (result,) = run_batch(gen, [[3, 4, 5]], cancel_event=cancel)
    assert result.finish_reason == "cancelled"
    assert all(session.closed for session in (*gen.decoder.sessions, *gen.assistant.decoder.sessions))


def test_closing_the_steps_closes_both_sessions():
    gen = compile_fake(1, assistant={}, max_new_tokens=9)
    steps = generation.generate_steps(gen, [[3]], [0])
    next(steps), next(steps)
    steps.close()
    assert all(session.closed for session in (*gen.decoder.sessions, *gen.assistant.decoder.sessions))


def test_custom_processors_see_only_sequences_of_prompt_and_drafts():
    """A processor's state is computed once for each sequence with drafts, the assistant's and the tree's."""
    states = []

    def state(row):
        states.append((row["prompt"], row["generated"]))
        return np.zeros(1)

    gen = compile_fake(1, assistant={}, num_assistant_tokens=2, max_new_tokens=7, processors=[(state, lambda x, _: x)])
    _, (result,) = run_batch(gen, [[3, 4]])
    new_tokens = [token.id for token in result.tokens]
    assert all(prompt == [3, 4] for prompt, _ in states)
    assert all(generated[::-1] == new_tokens[: len(generated)] for _, generated in states)


def test_unsupported_combinations_with_an_assistant_are_refused():
    with pytest.raises(GenerationError, match="num_beams"):
        compile_fake(1, assistant={}, num_beams=2)
    with pytest.raises(GenerationError, match="prompt_lookup_num_tokens"):
        compile_fake(1, assistant={}, prompt_lookup_num_tokens=2)
    with pytest.raises(GenerationError, match=f"logits of 9 tokens; expected the model's {VOCAB}"):
        compile_fake(1, assistant={"vocab": 9})
    for one, other in ((False, True), (True, False)):
        with pytest.raises(GenerationError, match="assistant_model"):
            compile_fake(1, fake={"supports_drafts": one}, assistant={"supports_drafts": other})


def test_another_tokenizer_is_an_error():
    own, other, alike = (fake_model() for _ in range(3))
    own.tokenizer = SimpleNamespace(vocabulary={"a": 0, "b": 1, "c": 2})
    other.tokenizer = SimpleNamespace(vocabulary={"a": 0, "b": 2, "c": 1})
    alike.tokenizer = SimpleNamespace(vocabulary={"c": 2, "b": 1, "a": 0})
    with pytest.raises(GenerationError, match="2 tokens differ"):
        generation.context(own, assistant_model=other)
    assert generation.context(own, assistant_model=alike).assistant_model is alike
