"""FullContextSession: a decoder without a cache, with padding on either side or none, in batches and forks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from decoding import decoded, prefill, rows_of, tokens_of

from mlx_transmuter import generation
from mlx_transmuter.program.run_plan import PADDING_SIDES, RunPlan
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.full_context_session import FullContextSession


def test_the_conversion_finds_that_there_is_no_cache(loaded):
    model = loaded("gpt2_reread")
    decoder = Decoder(model.decoder, 2)
    assert model.cache_mode == "grow"
    assert not decoder.signature.pairs
    assert isinstance(decoder.begin_session([4, 4]), FullContextSession)
    assert decoder.plan == RunPlan("grow", "whole", "right")
    assert decoder.signature.selects_logits  # only the logits of each row's last token are computed
    assert not decoder.supports_drafts


@pytest.mark.parametrize("padding", PADDING_SIDES)
def test_rows_give_the_tokens_of_the_reference_with_padding_on_either_side(padding, loaded):
    decoder = Decoder(loaded("gpt2_reread").decoder, 3, plan=RunPlan("grow", "whole", padding))
    assert len(decoder.group_rows([3, 11, 29])) == (3 if padding == "none" else 1)
    assert decoded(decoder, rows_of("gpt2_reread")) == tokens_of(rows_of("gpt2_reread"))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_its_logits_are_those_of_the_same_weights_with_a_cache(padding, loaded):
    """Ragged rows beside a padding row, in chunks of any size, with and without positions of the caller."""
    uncached, cached = (Decoder(loaded(name).decoder, 3, plan=plan) for name, plan in
                    (("gpt2_reread", RunPlan("grow", "whole", padding)), ("gpt2", None)))  # fmt: skip
    draw = np.random.default_rng(0)
    for positions in (None, 2):
        sessions = [decoder.begin_session([40, 0, 40]) for decoder in (uncached, cached)]
        lengths = np.zeros(3, int)
        for counts in ([5, 0, 2], [0, 0, 3], [1, 0, 1], [8, 0, 8], [1, 0, 0]):
            tokens = draw.integers(3, 120, (3, 8)).astype(np.int32)
            step_positions = (
                None if positions is None else (lengths[:, None] + np.arange(8)).astype(np.int32) * positions
            )
            actual = []
            for session in sessions:
                logits = session.step(tokens, counts, step_positions)
                session.evaluate(logits)
                actual.append(np.array(logits))
            lengths += counts
            for row in np.flatnonzero(counts):
                assert np.abs(actual[0][row] - actual[1][row]).max() <= 1e-4 * np.ptp(actual[1][row])


@pytest.mark.parametrize("padding", PADDING_SIDES)
def test_forked_rows_continue_their_parents(padding, loaded):
    decoder = Decoder(loaded("gpt2_reread").decoder, 3, plan=RunPlan("grow", "whole", padding))
    prompt = rows_of("gpt2_reread")[1]["prompt"]
    session = decoder.begin_session([40] * 3, paged=True)
    prefill(session, [prompt, prompt[::-1], []])
    session.fork([1, 0, 0])
    texts = [[*text, token] for text, token in zip((prompt[::-1], prompt, prompt), (5, 6, 7), strict=True)]
    logits = session.step(np.array([[text[-1]] for text in texts], np.int32), [1, 1, 1])
    session.evaluate(logits)
    for row, text in enumerate(texts):
        single_row = Decoder(loaded("gpt2").decoder, 1).begin_session([40])
        expected = prefill(single_row, [text])[0]
        assert np.abs(np.array(logits)[row] - expected).max() <= 1e-4 * np.ptp(expected)


def test_steps_are_compiled_per_bucket_of_columns(loaded):
    decoder = Decoder(loaded("gpt2_reread").decoder, 1)
    session = decoder.begin_session([200])
    for _ in range(150):
        session.evaluate(session.step(np.array([[5]], np.int32), [1]))
    assert decoder.compilations == 3  # 64, 128 and 256 columns
    assert decoder.full_context_columns(250) == 256  # not past the table of positions


def test_a_prompt_is_one_step(loaded, monkeypatch):
    model, steps, real = loaded("gpt2_reread"), [], FullContextSession.step
    monkeypatch.setattr(
        FullContextSession,
        "step",
        lambda session, tokens, *rest: steps.append(tokens.shape) or real(session, tokens, *rest),
    )
    ctx = generation.context(model, max_new_tokens=3, do_sample=False, eos_token_id=None)
    generation.generate(generation.compile(ctx, 2), [[5] * 13, [6] * 7], [0, 0])
    assert steps == [(2, 13), (2, 1), (2, 1)]


def test_wrong_steps_are_refused(loaded):
    decoder = Decoder(loaded("gpt2_reread").decoder, 2)
    session = decoder.begin_session([5, 0])
    two = np.zeros((2, 2), np.int32)
    for tokens, counts in [(two[:1], [2]), (two, [3, 0]), (two, [2, 1]), (np.zeros((2, 8), np.int32), [6, 0])]:
        with pytest.raises(DecoderError):
            session.step(tokens, counts)
    session.evaluate(session.step(mx.array(two), [2, 0]))
    assert session.lengths.tolist() == [2, 0]
    unpadded = Decoder(loaded("gpt2_reread").decoder, 2, plan=RunPlan("grow", "whole", "none")).begin_session([5, 5])
    with pytest.raises(DecoderError, match="one length"):
        unpadded.step(two, [2, 1])
    with pytest.raises(DecoderError, match="no cache"):
        session.verify_draft(two, two, two)
    session.close()
    with pytest.raises(DecoderError, match="closed"):
        session.step(two, [2, 0])


def test_positions_of_the_caller_are_kept(loaded):
    """Tokens without positions, after some that had them, are at their indices."""
    prompt, positions = [5, 6, 7, 8], np.array([[0, 2, 4, 6]], np.int32)
    logits = []
    for parts in ([(prompt, positions), ([9], None)], [([*prompt, 9], np.array([[0, 2, 4, 6, 4]], np.int32))]):
        session = Decoder(loaded("gpt2_reread").decoder, 1).begin_session([5])
        for tokens, step_positions in parts:
            actual = session.step(np.array([tokens], np.int32), [len(tokens)], step_positions)
            session.evaluate(actual)
        logits.append(np.array(actual))
    assert np.array_equal(*logits)
