"""The loop: ragged batches against the reference loops, groups, reported steps, stops, cancelling, running ahead."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from fake_decoder import FakeDecoder, logits_after
from fake_generation import compile_fake, fake_model, generated_ids, results_with_errors, run_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_loops import greedy
from setting_strategies import PROCESSOR_SETTINGS, VOCAB

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError, Token

PROMPTS = [[3, 4, 5], [6], [], [7, 8, 9, 3, 3, 3, 4, 11, 12, 13, 2], [5, 5]]
EOS = [0, 1, 2]
FAKES = [{}, {"by_length": True}, {"runs_ahead": True}, {"by_length": True, "runs_ahead": True}, {"dtype": mx.float16}]

OPTIONS = {
    **PROCESSOR_SETTINGS,
    "suppress_tokens": st.just([4, 8, 12]),
}


@settings(max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9), min_size=1, max_size=5),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    fake=st.sampled_from(FAKES[:4]),
    step=st.sampled_from([None, 1, 4]),
)
def test_a_ragged_batch_gives_each_row_what_plain_loops_give_it(prompts, options, fake, step):
    options = {**options, "max_new_tokens": 8, "eos_token_id": EOS}
    gen = compile_fake(len(prompts), fake=fake, prefill_step_size=step, token_logprobs=True, **options)
    found = results_with_errors(gen, prompts, [0] * len(prompts))
    for prompt, result in zip(prompts, found, strict=True):
        if not prompt:
            assert result.tokens == []
            continue
        tokens, logprobs, reason = greedy(lambda tokens: logits_after(tokens, VOCAB), prompt, **options)
        assert [token.id for token in result.tokens] == tokens
        np.testing.assert_allclose([token.logprob for token in result.tokens], logprobs, atol=1e-4)
        assert result.finish_reason == reason


@pytest.mark.parametrize("kernel", [False, True])
def test_a_long_prompt_runs_in_chunks_of_the_default_step_size(kernel, monkeypatch):
    """As many as mlx_lm takes, and fewer on the CPU, where all attention scores are in memory at once."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu) if kernel else mx.Device(mx.cpu))
    gen = compile_fake(1, max_new_tokens=1)
    prompt = [3 + i % 7 for i in range(5000 if kernel else 700)]
    assert len(generation.generate(gen, [prompt], [0])[0]) == 1
    sizes = [size for size, _ in gen.decoder.sessions[-1].steps]
    assert sizes == ([2048, 2048, 512, 256, 128, 8] if kernel else [128, 128, 128, 128, 128, 32, 16, 8, 4])


@pytest.mark.parametrize("fake", FAKES)
def test_on_token_reports_exactly_the_tokens_of_the_results(fake):
    gen = compile_fake(5, fake=fake, max_new_tokens=7, eos_token_id=EOS, token_logprobs=True)
    reported: list[list[tuple[int, float]]] = [[] for _ in PROMPTS]
    ended = [False] * len(PROMPTS)
    events = []
    rows = generation.generate(gen, PROMPTS, [0] * 5, on_token=events.append)
    for event in events:
        assert set(event) == {"token", "finished", "logprob"}
        assert event["token"].dtype == np.int32
        assert event["finished"].dtype == bool
        assert event["logprob"].dtype == np.float32
        for row in range(5):
            token = int(event["token"][row])
            assert np.isnan(event["logprob"][row]) == (token == -1)
            assert not (ended[row] and token >= 0)
            if token >= 0:
                reported[row].append((token, float(event["logprob"][row])))
            ended[row] = bool(event["finished"][row])
    assert all(ended)
    assert [[Token(*pair) for pair in row] for row in reported] == rows
    assert any(len(row) < 7 for row in rows if row)
    assert any(len(row) == 7 for row in rows)


def test_on_token_reports_log_probabilities_only_when_asked_for():
    events = []
    rows = generation.generate(compile_fake(1, max_new_tokens=3), [[3]], [0], on_token=events.append)
    assert [set(event) for event in events] == [{"token", "finished"}] * 3
    assert [token.logprob for token in rows[0]] == [None] * 3


def test_the_steps_of_a_batch_are_the_chunks_of_its_longest_prompt_and_one_per_token():
    gen = compile_fake(3, max_new_tokens=4)
    run_batch(gen, [[3] * 13, [4] * 9, []])
    (session,) = gen.decoder.sessions
    assert session.max_lengths == [17, 13, 0]
    assert session.steps == [(8, [8, 8, 0]), (4, [4, 1, 0]), (1, [1, 0, 0]), *[(1, [1, 1, 0])] * 3]
    assert session.closed


def test_a_finished_row_is_padding_while_the_others_continue():
    gen = compile_fake(2, max_new_tokens=9, eos_token_id=[1, 2])
    _, (first, second) = run_batch(gen, [[3, 4], [7]])
    assert len(first.tokens) != len(second.tokens)
    assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
    short, long = sorted((len(first.tokens), len(second.tokens)))
    assert [sum(counts) for _, counts in gen.decoder.sessions[0].steps[1:]] == [2] * short + [1] * (long - short)


def test_groups_run_one_after_another_with_the_other_rows_as_padding():
    gen = compile_fake(4, fake={"by_length": True}, max_new_tokens=3)
    steps, _ = run_batch(gen, [[3, 4], [5], [6, 7], []])
    first, second = gen.decoder.sessions
    assert [counts for _, counts in first.steps] == [[0, 1, 0, 0]] * 3
    assert [counts for _, counts in second.steps] == [[2, 0, 2, 0], [1, 0, 1, 0], [1, 0, 1, 0]]
    assert (first.max_lengths, second.max_lengths) == ([0, 4, 0, 0], [5, 0, 5, 0])
    assert [step.finished.tolist() for step in steps[2:4]] == [[False, True, False, True]] * 2
    assert [(step.token >= 0).tolist() for step in steps[2:4]] == [
        [False, True, False, False],
        [True, False, True, False],
    ]


def test_each_step_is_evaluated_once():
    gen = compile_fake(2, max_new_tokens=6)
    run_batch(gen, [[3] * 6, [4]])
    assert gen.decoder.sessions[0].evaluate_waits == [True] * (2 + 6)


@pytest.mark.parametrize("options", [{"max_new_tokens": 6}, {"max_new_tokens": 30, "eos_token_id": [0, 1, 2, 3]}])
def test_running_ahead_wastes_at_most_one_step(options):
    behind, ahead = compile_fake(2, **options), compile_fake(2, fake={"runs_ahead": True}, **options)
    prompts = [[3, 4], [5]]
    assert run_batch(behind, prompts)[1] == run_batch(ahead, prompts)[1]
    plain, fast = behind.decoder.sessions[0], ahead.decoder.sessions[0]
    assert 0 <= len(fast.steps) - len(plain.steps) <= 1
    assert not any(fast.evaluate_waits[2:])
    if "eos_token_id" not in options:
        assert len(fast.steps) == len(plain.steps)


def test_running_ahead_submits_a_step_before_the_token_is_reported():
    gen = compile_fake(1, fake={"runs_ahead": True}, max_new_tokens=4)
    steps = generation.generate_steps(gen, [[3]], [0])
    taken = [len(gen.decoder.sessions[0].steps) for _ in steps]
    assert taken == [2, 3, 4, 4]


@pytest.mark.parametrize(
    "options", [{"no_repeat_ngram_size": 2}, {"processors": [(lambda row: np.zeros(1), lambda x, y: x)]}]
)
def test_nothing_runs_ahead_where_the_host_reads_each_token(options):
    gen = compile_fake(1, fake={"runs_ahead": True}, max_new_tokens=4, **options)
    steps = generation.generate_steps(gen, [[3]], [0])
    assert [len(gen.decoder.sessions[0].steps) for _ in steps] == [1, 2, 3, 4]
    assert all(gen.decoder.sessions[0].evaluate_waits)


@pytest.mark.parametrize("fake", [{}, {"runs_ahead": True}])
def test_stop_ends_a_row_after_its_last_token(fake):
    gen = compile_fake(2, fake=fake, max_new_tokens=8)
    stop_calls = []

    def stop(tokens):
        stop_calls.append(list(tokens))
        return len(tokens) == 3

    _, (first, second) = run_batch(gen, [[3], [4]], stop=[stop, None])
    assert (len(first.tokens), first.finish_reason) == (3, "stop")
    assert (len(second.tokens), second.finish_reason) == (8, "length")
    assert stop_calls == [[token.id for token in first.tokens][: n + 1] for n in range(3)]


def test_stop_strings_need_a_stop_condition():
    gen = compile_fake(1, max_new_tokens=3, stop_strings="end")
    with pytest.raises(GenerationError, match="stop_strings"):
        generation.generate_steps(gen, [[3]], [0])
    run_batch(gen, [[3]], stop=[lambda tokens: False])


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_cancel_from_another_thread_ends_the_run(options):
    cancel, reached = threading.Event(), threading.Event()

    def state(row):
        if len(row["generated"]) == 3:
            reached.set()
            cancel.wait(10)
        return np.zeros(1)

    gen = compile_fake(1, max_new_tokens=500, processors=[(state, lambda logits, _: logits)], **options)
    canceller = threading.Thread(target=lambda: (reached.wait(10), cancel.set()))
    canceller.start()
    _, (result,) = run_batch(gen, [[3]], cancel_event=cancel)
    canceller.join()
    assert result.finish_reason == "cancelled"
    assert 3 <= len(result.tokens) <= 4
    assert gen.decoder.sessions[0].closed


def test_a_cancelled_run_takes_no_more_of_the_prompt():
    cancel = threading.Event()
    cancel.set()
    for options in ({}, {"num_beams": 2}):
        gen = compile_fake(1, max_new_tokens=5, **options)
        _, (result,) = run_batch(gen, [[3, 4]], cancel_event=cancel)
        assert (result.tokens, result.finish_reason) == ([], "cancelled")
        assert gen.decoder.sessions[0].steps == []


def test_closing_the_steps_closes_the_session():
    gen = compile_fake(1, fake={"runs_ahead": True}, max_new_tokens=500)
    steps = generation.generate_steps(gen, [[3]], [0])
    next(steps)
    steps.close()
    assert gen.decoder.sessions[0].closed
    assert len(gen.decoder.sessions[0].steps) <= 2


def test_an_error_of_the_caller_closes_the_session():
    def on_token(event):
        raise RuntimeError("a caller's own")

    gen = compile_fake(1, max_new_tokens=5)
    with pytest.raises(RuntimeError, match="own"):
        generation.generate(gen, [[3]], [0], on_token=on_token)
    gc.collect()
    assert gen.decoder.sessions[0].closed


def test_logits_do_not_outlive_their_step():
    gen = compile_fake(2, max_new_tokens=6, token_logprobs=True)
    alive: list[weakref.ref] = []
    most = 0
    begin = gen.decoder.begin_session

    def begin_watched_session(*args, **more):
        session = begin(*args, **more)
        step = session.step

        def count_and_step(*args):
            nonlocal most
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            logits = step(*args)
            alive.append(weakref.ref(logits))
            return logits

        session.step = count_and_step
        return session

    gen.decoder.begin_session = begin_watched_session
    run_batch(gen, [[3] * 29, [4]])
    assert len(alive) == 4 + 5
    assert most <= 1


def test_a_row_ends_at_the_last_position():
    """A token needs a position only to be read: the last one is generated without one."""
    gen = compile_fake(2, fake={"max_positions": 6}, max_new_tokens=50)
    _, (first, second) = run_batch(gen, [[3, 4, 5, 6], [3] * 6])
    assert (len(first.tokens), first.finish_reason) == (3, "length")
    assert (len(second.tokens), second.finish_reason) == (1, "length")
    assert gen.decoder.sessions[0].max_lengths == [6, 6]


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[3], [4]], [0], "prompts"),
        ([[3]], [0, 1], "seeds"),
        ([[VOCAB]], [0], "ids from 0 to 15"),
        ([[3, -1]], [0], "ids from 0 to 15"),
        ([[3] * 9], [0], "at most 8 tokens, where the model's table of positions ends .wpe."),
    ],
)
def test_wrong_prompts_are_an_error_before_anything_runs(prompts, seeds, message):
    gen = compile_fake(1, fake={"max_positions": 8}, max_new_tokens=5)
    with pytest.raises(GenerationError, match=message):
        generation.generate_steps(gen, prompts, seeds)
    assert gen.decoder.sessions == []


def test_max_length_counts_the_prompt_of_each_row():
    assert [len(text) for text in generated_ids(2, [[3] * 4, [4]], max_length=9)] == [5, 8]
    gen = compile_fake(1, generation_config={"max_length": 12})
    assert len(run_batch(gen, [[3] * 4])[1][0].tokens) == 8
    with pytest.raises(GenerationError, match="max_length"):
        run_batch(gen, [[3] * 12])


def test_a_batch_of_padding_alone_gives_nothing():
    gen = compile_fake(2, max_new_tokens=5)
    steps, found = run_batch(gen, [[], []])
    assert steps == []
    assert [result.tokens for result in found] == [[], []]
    assert gen.decoder.sessions == []


def test_inputs_go_to_the_decoder_with_a_row_for_each_beam():
    gen = compile_fake(2, given=["encoder_hidden_states"], num_beams=2, max_new_tokens=2)
    states = mx.arange(2 * 3).reshape(2, 3).astype(mx.float32)
    run_batch(gen, [[3], [4]], inputs={"encoder_hidden_states": states})
    given = gen.decoder.sessions[0].extra_inputs["encoder_hidden_states"]
    assert given.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]


def test_a_context_takes_the_extra_inputs_that_the_decoder_declares():
    """`given` is optional: the signature of the decoder names what is neither token, mask, position nor cache."""
    inputs = [
        SimpleNamespace(name=name, dtype="float32", shape=("batch", "length"))
        for name in ("input_ids", "attention_mask", "encoder_hidden_states", "encoder_attention_mask")
    ]
    logits = SimpleNamespace(name="logits", dtype="float32", shape=("batch", "length", VOCAB))
    model = fake_model()
    model.decoder = SimpleNamespace(
        program=SimpleNamespace(inputs=inputs, outputs=[logits], all_nodes=list, input=lambda name: None)
    )
    declared = ("encoder_hidden_states", "encoder_attention_mask")
    assert generation.context(model).extra_input_names == declared
    assert generation.context(model, given=["encoder_hidden_states"]).extra_input_names == declared[:1]
    model.decoder.program.outputs = []
    assert generation.context(model).extra_input_names == ()
    states = {name: mx.ones((1, 3)) for name in declared}
    ctx = replace(generation.context(fake_model(), max_new_tokens=2), extra_input_names=declared)
    decoder = FakeDecoder(1, VOCAB)
    gen = generation.compile(ctx, 1, decoder=decoder)
    assert len(run_batch(gen, [[3]], inputs=states)[1][0].tokens) == 2
    assert decoder.sessions[0].extra_inputs.keys() == set(declared)


@pytest.mark.parametrize(
    "inputs", [{}, {"encoder_hidden_states": np.zeros((3, 4)), "more": 1}, {"encoder_hidden_states": np.zeros((3, 4))}]
)
def test_inputs_that_the_context_does_not_name_are_an_error(inputs):
    gen = compile_fake(2, given=["encoder_hidden_states"], max_new_tokens=2)
    with pytest.raises(GenerationError, match="input"):
        generation.generate_steps(gen, [[3], [4]], [0, 0], inputs)


def test_positions_of_a_task_go_with_every_step():
    gen = compile_fake(2, max_new_tokens=3)
    run_batch(gen, [[3, 4, 5], [6]], inputs={"position_ids": [[[0, 4, 4]], []]})
    assert [positions.tolist() for positions in gen.decoder.sessions[0].positions] == [
        [[0, 4], [0, 1]],
        [[4], [1]],
        [[5], [1]],
        [[6], [2]],
    ]


def test_the_encoder_settings_read_the_encoders_tokens():
    options = {"encoder_repetition_penalty": 50.0, "encoder_no_repeat_ngram_size": 2, "max_new_tokens": 6}
    gen = compile_fake(2, config={"is_encoder_decoder": True}, **options)
    source = [[9, 10, 9, 11], [5, 6]]
    _, found = run_batch(gen, [[3], [4]], inputs={"encoder_input_ids": source})
    for prompt, tokens, result in zip([[3], [4]], source, found, strict=True):
        expected, _, _ = greedy(lambda tokens: logits_after(tokens, VOCAB), prompt, source=tokens, **options)
        assert [token.id for token in result.tokens] == expected
    with pytest.raises(GenerationError, match="encoder_input_ids"):
        generation.generate_steps(gen, [[3], [4]], [0, 0])


def test_a_model_of_embeddings_is_refused_by_name():
    with pytest.raises(GenerationError, match="embed"):
        generation.context(fake_model(), embed=object())


@pytest.mark.parametrize(
    ("prompts", "seeds", "inputs", "found"),
    [
        ([[5.7, 3]], [0], {}, "prompt 0"),
        (["abc"], [0], {}, "prompt 0"),
        ([[1, 2]], ["a"], {}, "seeds"),
        ([[1, 2]], [1.5], {}, "seeds"),
        ([[1, 2]], [None], {}, "seeds"),
        ([[1, 2]], [0], {"position_ids": [[[0, 2**40]]]}, "position_ids"),
        ([[1, 2]], [0], {"position_ids": [[[-1, 0]]]}, "position_ids"),
        ([[1, 2]], [0], {"position_ids": [[[0, 1.5]]]}, "position_ids"),
    ],
)
def test_values_that_are_no_whole_numbers_or_out_of_range_are_refused_before_anything_runs(
    prompts, seeds, inputs, found
):
    with pytest.raises(GenerationError, match=found):
        generation.generate(compile_fake(1), prompts, seeds, inputs)


def test_processors_that_are_no_pairs_are_refused():
    with pytest.raises(GenerationError, match="pair of functions"):
        compile_fake(1, processors=[1])
