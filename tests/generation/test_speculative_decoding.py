"""Speculative decoding over a language model that is a pure function: results are those of plain decoding whatever is
drafted, and each pass is one call and one evaluation."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest
from fake_generation import compile_fake, results_with_errors, run_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from setting_strategies import PROCESSOR_SETTINGS, VOCAB

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError, GenerationResult
from mlx_transmuter.generation.drafts import speculative_decoding
from mlx_transmuter.generation.drafts.draft_acceptance import DraftSelection
from mlx_transmuter.generation.drafts.draft_tree import DraftTree
from mlx_transmuter.generation.row import Row

EOS_TOKEN_IDS = [0, 1]
# With a context of one token a row repeats itself soon, with one of two tokens later.
SHORT_CONTEXT = {"memory": 2}


class OracleDrafter:
    """Drafts trees with prefixes of the expected tokens, and wrong tokens at random, in a random order."""

    def __init__(self, expected: Mapping[int, list[int]], seed: int):
        self.expected, self.draw = expected, np.random.default_rng(seed)

    def propose(self, rows: Mapping[int, Row], max_draft_tokens: Mapping[int, int], max_depths: Mapping[int, int], *_):
        trees = {}
        for row, text in rows.items():
            right = self.expected[row][len(text.new_tokens) :]
            tree = trees[row] = DraftTree(text.token_ids[-1])
            for _ in range(self.draw.integers(0, max_draft_tokens[row] + 1)):
                parent = int(self.draw.integers(0, len(tree)))
                spelled = [tree.tokens[node] for node in tree.path_to(parent)[1:]]
                if len(spelled) < max_depths[row]:
                    follows = (
                        spelled == right[: len(spelled)] and len(spelled) < len(right) and self.draw.random() < 0.8
                    )
                    tree.add(parent, right[len(spelled)] if follows else int(self.draw.integers(2, VOCAB)))
        return trees

    def close(self) -> None:
        pass


def assert_same_results(found: list[GenerationResult], plain: list[GenerationResult]) -> None:
    for one, other in zip(found, plain, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert [token.logprob for token in one.tokens] == [token.logprob for token in other.tokens]
        assert one.finish_reason == other.finish_reason


OPTIONS = {
    **PROCESSOR_SETTINGS,
    "exponential_decay_length_penalty": st.just((2, 1.4)),
    "prefill_step_size": st.sampled_from([1, 4]),
    "num_assistant_tokens_schedule": st.sampled_from(["constant", "heuristic", "heuristic_transient"]),
    "processors": st.just([(lambda row: np.array([len(row["generated"]), sum(row["generated"])], np.float32),
                            lambda logits, seen: logits + mx.sin(seen[0] + seen[1] * mx.arange(VOCAB)))]),
}  # fmt: skip
SAMPLING = {
    "temperature": st.sampled_from([0.7, 1.5]),
    "top_k": st.integers(0, 9),
    "top_p": st.sampled_from([0.8, 1.0]),
    "num_return_sequences": st.integers(1, 3),
}
PROMPTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=9), min_size=1, max_size=4)


@settings(max_examples=80)
@given(
    prompts=PROMPTS,
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    sampling=st.none() | st.fixed_dictionaries({"do_sample": st.just(True)}, optional=SAMPLING),
    max_draft_tokens=st.sampled_from([1, 2, 4, 9]),
    seed=st.integers(0, 99),
    positions=st.sampled_from([None, None, 12]),
)
def test_results_are_those_of_plain_decoding_whatever_is_drafted(
    prompts, options, sampling, max_draft_tokens, seed, positions
):
    options = {
        **options,
        **(sampling or {}),
        "max_new_tokens": 11,
        "eos_token_id": EOS_TOKEN_IDS,
        "token_logprobs": True,
    }
    fake = {"max_positions": positions}
    seeds = [seed + row for row in range(len(prompts))]
    plain = results_with_errors(compile_fake(len(prompts), fake=fake, **options), prompts, seeds)
    gen = compile_fake(len(prompts), fake=fake, prompt_lookup_num_tokens=max_draft_tokens, **options)
    expected = {row: [token.id for token in result.tokens] for row, result in enumerate(plain)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative_decoding, "_make_drafter", lambda group: OracleDrafter(expected, seed))
        found = results_with_errors(gen, prompts, seeds)
    assert_same_results(found, plain)


@settings(max_examples=40)
@given(
    prompts=PROMPTS,
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    sampling=st.none() | st.fixed_dictionaries({"do_sample": st.just(True)}, optional=SAMPLING),
    max_draft_tokens=st.sampled_from([1, 3, 8]),
    size=st.integers(1, 3),
)
def test_prompt_lookup_gives_the_results_of_plain_decoding(prompts, options, sampling, max_draft_tokens, size):
    options = {
        **options,
        **(sampling or {}),
        "max_new_tokens": 24,
        "eos_token_id": EOS_TOKEN_IDS,
        "token_logprobs": True,
    }
    seeds = list(range(len(prompts)))
    plain = results_with_errors(compile_fake(len(prompts), fake=SHORT_CONTEXT, **options), prompts, seeds)
    lookup = {"prompt_lookup_num_tokens": max_draft_tokens, "max_matching_ngram_size": size}
    found = results_with_errors(compile_fake(len(prompts), fake=SHORT_CONTEXT, **lookup, **options), prompts, seeds)
    assert_same_results(found, plain)


def test_a_repetitive_row_takes_few_passes_of_few_shapes_and_one_evaluation_each():
    options = {"max_new_tokens": 60, "fake": {"memory": 1}, "prompt_lookup_num_tokens": 7, "token_logprobs": True}
    gen = compile_fake(2, **options)
    selected = []
    path = gen.draft_selection.select_along_tree

    def record_selection(*args):
        packed, state = path(*args)
        selected.append((packed.dtype, packed.shape[0], packed.shape[2]))
        return packed, state

    gen.draft_selection.select_along_tree = record_selection
    _, found = run_batch(gen, [[3, 4, 5], [6]])
    (session,) = gen.decoder.sessions
    passes = len(session.draft_sizes)
    assert len(session.evaluate_waits) == 2 + 1 + passes  # the prompts' two chunks, the first tokens, the passes
    assert all(session.evaluate_waits)
    assert selected == [(mx.int32, 2, 2)] * passes  # one array of tokens and log-probabilities per pass
    assert len(session.steps) == 2
    assert set(session.draft_sizes) <= {1, 2, 4, 8}
    assert passes <= 20
    for result in found:
        assert result.draft_counts.passes + result.draft_counts.accepted + 1 == len(result.tokens) == 60
        assert result.draft_counts.tokens_per_pass > 3
        assert result.draft_counts.proposed >= result.draft_counts.accepted


@pytest.mark.usefixtures("compiling")
def test_the_selection_along_a_tree_is_compiled_once_per_shape(monkeypatch):
    traced = []
    walk = DraftSelection._select_along_tree

    def record_trace(self, logits, *rest):
        traced.append((logits.shape[1], rest[-1]))
        return walk(self, logits, *rest)

    monkeypatch.setattr(DraftSelection, "_select_along_tree", record_trace)
    gen = compile_fake(2, fake=SHORT_CONTEXT, max_new_tokens=80, prompt_lookup_num_tokens=7, repetition_penalty=1.01)
    for _ in range(2):
        run_batch(gen, [[3, 4, 5], [6]])
    (_, session) = gen.decoder.sessions
    assert len(session.draft_sizes) > len(traced)
    assert len(set(traced)) == len(traced) <= 10


def test_the_schedule_sets_the_number_of_draft_tokens(monkeypatch):
    draft_limits: dict[str, list[int]] = {}

    class Wrong(OracleDrafter):
        def __init__(self, schedule, right):
            self.schedule, self.right = schedule, right

        def propose(self, rows, max_draft_tokens, max_depths, *_):
            draft_limits.setdefault(self.schedule, []).append(max_draft_tokens[0])
            tree = DraftTree(rows[0].token_ids[-1])
            count, node = len(rows[0].new_tokens), 0
            for token in self.right[count : count + min(max_draft_tokens[0], max_depths[0])]:
                # The drafts of the third and fourth pass are wrong.
                node = tree.add(node, token if len(draft_limits[self.schedule]) not in (3, 4) else (token + 1) % VOCAB)
            return {0: tree}

    (plain,) = run_batch(compile_fake(1, max_new_tokens=40), [[3]])[1]
    for schedule in ("constant", "heuristic"):
        gen = compile_fake(1, max_new_tokens=40, prompt_lookup_num_tokens=4, num_assistant_tokens_schedule=schedule)
        right = [token.id for token in plain.tokens]
        monkeypatch.setattr(
            speculative_decoding, "_make_drafter", lambda group, right=right, name=schedule: Wrong(name, right)
        )
        assert_same_results(run_batch(gen, [[3]])[1], [plain])
    assert set(draft_limits["constant"]) == {4}
    assert draft_limits["heuristic"][:7] == [4, 4, 4, 3, 2, 4, 4]


def test_steps_are_reported_in_order_and_one_token_at_a_time():
    options = {"max_new_tokens": 30, "eos_token_id": EOS_TOKEN_IDS, "token_logprobs": True, "fake": SHORT_CONTEXT}
    prompts = [[3, 4, 5], [6], [], [7, 7]]
    reported: list[list[tuple[int, float]]] = [[] for _ in prompts]
    ended = [not prompt for prompt in prompts]

    def report(event):
        for row in range(len(prompts)):
            token, logprob = int(event["token"][row]), float(event["logprob"][row])
            assert np.isnan(logprob) == (token == -1)
            assert not (ended[row] and token >= 0)
            if token >= 0:
                reported[row].append((token, logprob))
            ended[row] = bool(event["finished"][row])

    plain = generation.generate(compile_fake(4, **options), prompts, [0] * 4)
    found = generation.generate(
        compile_fake(4, prompt_lookup_num_tokens=6, **options), prompts, [0] * 4, on_token=report
    )
    assert found == plain
    assert reported == [[tuple(token) for token in row] for row in plain]
    assert all(ended)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13])
def test_a_stop_inside_an_accepted_path_ends_the_row_there(at):
    stop_calls = []

    def stop(tokens):
        stop_calls.append(len(tokens))
        return len(tokens) == at

    gen = compile_fake(2, fake={"memory": 1}, max_new_tokens=30, prompt_lookup_num_tokens=8)
    _, (first, second) = run_batch(gen, [[3], [4]], stop=[stop, None])
    assert (len(first.tokens), first.finish_reason) == (at, "stop")
    assert (len(second.tokens), second.finish_reason) == (30, "length")
    assert stop_calls == list(range(1, at + 1))


def test_cancelling_ends_the_run_after_the_current_token():
    cancel = threading.Event()
    gen = compile_fake(1, fake={"memory": 1}, max_new_tokens=50, prompt_lookup_num_tokens=8)
    steps = generation.generate_steps(gen, [[3]], [0], cancel_event=cancel)
    for _ in range(20):
        next(steps)
    cancel.set()
    with pytest.raises(StopIteration) as end:
        next(steps)
    (result,) = end.value.value
    assert (len(result.tokens), result.finish_reason) == (20, "cancelled")
    assert gen.decoder.sessions[0].closed
    gen = compile_fake(1, max_new_tokens=50, prompt_lookup_num_tokens=8)
    assert run_batch(gen, [[3]], cancel_event=cancel)[1][0].tokens == []


def test_groups_of_equal_length_use_drafts_too():
    options = {"max_new_tokens": 12, "fake": {"by_length": True, **SHORT_CONTEXT}}
    prompts = [[3, 4], [5], [6, 7], []]
    assert_same_results(
        run_batch(compile_fake(4, prompt_lookup_num_tokens=4, **options), prompts)[1],
        run_batch(compile_fake(4, **options), prompts)[1],
    )


def test_unsupported_combinations_with_prompt_lookup_are_refused():
    with pytest.raises(GenerationError, match="num_beams"):
        compile_fake(1, num_beams=2, prompt_lookup_num_tokens=4)
    with pytest.raises(GenerationError, match="prompt_lookup_num_tokens"):
        compile_fake(1, prompt_lookup_num_tokens=4, fake={"supports_drafts": False})
    gen = compile_fake(1, prompt_lookup_num_tokens=4)
    with pytest.raises(GenerationError, match="position_ids"):
        generation.generate_steps(gen, [[3, 4]], [0], {"position_ids": [[[0, 4]]]})


def test_plain_decoding_has_no_draft_counts():
    assert run_batch(compile_fake(1, max_new_tokens=3), [[3]])[1][0].draft_counts is None
