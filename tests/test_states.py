"""States: tensors that a graph carries without positions, through batches, forks, beams and padding."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from conftest import golden
from decoding import decoded, prefill, rows_of, tokens_of, unrewritten_module

from mlx_transmuter import generation
from mlx_transmuter.generation import loop
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule

NAMES = ["lfm2", "deltanet_ort"]
LAYOUTS = [{}, {"paged": True, "block_size": 1}, {"paged": True, "block_size": 3}]


def test_the_pairs_of_a_graph_with_states(loaded):
    lfm2 = Decoder(loaded("lfm2").decoder, 2)
    assert [state.past for state in lfm2.signature.state_pairs] == ["past_conv.0", "past_conv.2"]
    assert [state.shape_for(5) for state in lfm2.signature.state_pairs] == [(5, 32, 3)] * 2
    assert [entry.past for entry in lfm2.signature.cache_pairs] == ["past_key_values.both.0"]
    assert lfm2.signature.uses_pools  # its attention is over pools all the same
    net = DecoderSignature.from_program(loaded("deltanet_ort").decoder.program)
    assert not net.cache_pairs
    assert [state.past for state in net.state_pairs] == [
        "past_conv.0", "past_recurrent.0", "past_conv.1", "past_recurrent.1"
    ]  # fmt: skip
    assert loaded("deltanet_ort").cache_mode == "grow"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", ["rewritten", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_each_length_run_together_and_give_the_tokens_of_the_reference(name, form, layout, loaded):
    decoder = Decoder(loaded(name).decoder if form == "rewritten" else unrewritten_module(name), 3)
    assert decoder.group_rows([5, 0, 3, 5]) == [[0, 3], [2]]
    assert decoded(decoder, rows_of(name), **layout) == tokens_of(rows_of(name))


def after(module: ProgramModule, tokens: list[int]) -> np.ndarray:
    """Returns the logits after the tokens, in a batch of one row and in one step."""
    session = Decoder(module, 1).begin_session([len(tokens)])
    logits = session.step(np.array([tokens], np.int32), [len(tokens)])
    session.evaluate(logits)
    return np.array(logits)[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rewritten", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_past_the_first_bucket_in_chunks_and_token_by_token(name, form, loaded):
    module = loaded(name).decoder if form == "rewritten" else unrewritten_module(name)
    prompt = np.random.default_rng(2).integers(3, 120, 100).tolist()
    expected = after(module, prompt)
    chunks = prefill(Decoder(module, 1).begin_session([100]), [prompt])[0]
    session = Decoder(module, 1).begin_session([100], paged=True)
    for token in prompt:
        logits = session.step(np.array([[token]], np.int32), [1])
        session.evaluate(logits)
    for actual in (chunks, np.array(logits)[0]):
        assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_few(name, loaded):
    """A prompt chunk and a step of one token are compiled per bucket of columns, not per length."""
    decoder = Decoder(loaded(name).decoder, 1)
    session = decoder.begin_session([64])
    prefill(session, [[5] * 20])
    before = decoder.compilations
    for _ in range(30):
        session.evaluate(session.step(np.array([[5]], np.int32), [1]))
    assert decoder.compilations - before <= 3  # one of a token, two that write what a graph as it is gives


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("form", ["rewritten", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_forked_rows_continue_with_their_parents_states(name, form, block, loaded):
    module = loaded(name).decoder if form == "rewritten" else unrewritten_module(name)
    prompts, draw = [row["prompt"] for row in rows_of(name)], np.random.default_rng(1)
    texts = [prompts[1], prompts[1][::-1], []]
    session = Decoder(module, 3).begin_session([40] * 3, paged=True, block_size=block)
    prefill(session, texts)
    for parents in ([0, 1, 1], [2, 0, 0], [1, 1, 2], [0, 1, 2]):
        session.fork(parents)
        texts = [list(texts[parent]) for parent in parents]
        new = draw.integers(3, 120, 3)
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
        logits = session.step(new[:, None].astype(np.int32), [1, 1, 1])
        session.evaluate(logits)
        for row, text in enumerate(texts):
            expected = after(module, text)
            assert np.abs(np.array(logits)[row] - expected).max() <= 1e-4 * np.ptp(expected), (parents, row)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_tokens_keeps_its_states(name, loaded):
    """A step of another row leaves its states unchanged: a fork continues from them."""
    module, prompt = loaded(name).decoder, rows_of(name)[1]["prompt"]
    session = Decoder(module, 2).begin_session([40, 40], paged=True)
    prefill(session, [prompt, prompt[::-1]])
    session.evaluate(session.step(np.array([[7], [9]], np.int32), [0, 1]))
    session.fork([0, 0])
    logits = session.step(np.array([[5], [6]], np.int32), [1, 1])
    session.evaluate(logits)
    for row, token in enumerate([5, 6]):
        expected = after(module, [*prompt, token])
        assert np.abs(np.array(logits)[row] - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", NAMES)
def test_padding_that_would_change_a_state_is_refused(name, loaded):
    decoder = Decoder(loaded(name).decoder, 2)
    assert decoder.plan.padding_side == "none"
    with pytest.raises(DecoderError, match="no padding"):
        decoder.begin_session([8, 8]).step(np.zeros((2, 4), np.int32), [4, 3])
    session = decoder.begin_session([8, 8])
    session.evaluate(session.step(np.zeros((2, 4), np.int32), [4, 0]))
    with pytest.raises(DecoderError, match="rows of one length"):
        session.step(np.zeros((2, 1), np.int32), [1, 1])


def results(gen: generation.CompiledGeneration, prompts: list[list[int]]) -> list[generation.GenerationResult]:
    steps = loop.generate_steps(gen, prompts, [0] * len(prompts))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("name", ["lfm2", "gpt2_reread", "gpt2_merged"])
def test_beams_are_those_of_transformers(name, loaded):
    """Of one prompt, and of prompts of several lengths in one batch."""
    beams, prompts = golden(name)["beams"], [row["prompt"] for row in golden(name)["rows"]]
    ctx = generation.context(
        loaded(name), num_beams=beams["num_beams"], max_new_tokens=beams["max_new_tokens"], do_sample=False
    )
    for some in ([0], [0, 1, 2]):
        gen = generation.compile(ctx, len(some))
        for result, i in zip(results(gen, [prompts[i] for i in some]), some, strict=True):
            assert [token.id for token in result.tokens] == beams["rows"][i]["tokens"]
            assert result.score == pytest.approx(beams["rows"][i]["score"], abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_of_a_batch_are_those_of_the_logits(name, loaded):
    """The log-probability of a token is the log-softmax of the logits after the text before it, in one step."""
    model, prompts = loaded(name), [row["prompt"] for row in rows_of(name)]
    ctx = generation.context(model, max_new_tokens=5, do_sample=False, token_logprobs=True, eos_token_id=None)
    for prompt, text in zip(prompts, generation.generate(generation.compile(ctx, 3), prompts, [0] * 3), strict=True):
        for i, token in enumerate(text):
            logits = mx.array(after(model.decoder, [*prompt, *(one.id for one in text[:i])]))
            expected = (logits - mx.logsumexp(logits))[token.id].item()
            assert token.logprob == pytest.approx(expected, abs=1e-4)


def test_a_program_without_a_recorded_padding_side_takes_no_padding(loaded):
    """Padding does not change the states of an older folder, or of one whose metadata is lost."""
    module = loaded("lfm2").decoder
    program = replace(module.program, metadata={})
    assert Decoder(ProgramModule(program, module.weights()), 1).plan.padding_side == "none"
