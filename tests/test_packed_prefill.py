"""Packed prefill: the logits, tokens and log-probabilities of plain steps, from fewer computed tokens."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from conftest import NAMES
from decoding import prefill, rows_of, tokens_of, unrewritten_module
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter import generation, ops
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.prefill_schedule import MAX_PACKED_TOKENS, plan_packed_prefill

DRAW = np.random.default_rng(11)
PROMPTS = [DRAW.integers(3, 60, n).tolist() for n in (37, 5, 0, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"paged": True}, {"paged": True, "block_size": 5}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_prefill_gives_the_logits_of_each_prompt_and_the_rows_continue(name, options, loaded):
    """Prompts longer than windows, a row without one, padding; then a plain step over what was stored."""
    decoder = Decoder(loaded(name).decoder, 4)
    if not decoder.supports_packed_prefill:
        pytest.skip("its attention is not over pools")
    total = [len(prompt) + 1 if prompt else 0 for prompt in PROMPTS]
    session, apart = decoder.begin_session(total, **options), decoder.begin_session(total)
    logits = session.prefill_packed(PROMPTS, 64)
    session.evaluate(logits)
    assert session.lengths.tolist() == list(map(len, PROMPTS))
    rows = [row for row, prompt in enumerate(PROMPTS) if prompt]
    tolerance = 2e-2 if name == "llama_fp16" else 1e-4

    def is_close(actual: mx.array, expected: np.ndarray) -> bool:
        off = ops.to_host(actual.astype(mx.float32))[rows] - expected[rows]
        return np.abs(off).max() <= tolerance * np.ptp(expected[rows])

    assert is_close(logits, prefill(apart, PROMPTS).astype(np.float32))
    following = [each.step(np.full((4, 1), 9, np.int32), [1, 1, 0, 1]) for each in (session, apart)]
    session.evaluate(following[0])
    apart.evaluate(following[1])
    assert is_close(following[0], ops.to_host(following[1].astype(mx.float32)))


@pytest.mark.slow
def test_most_fixtures_support_a_packed_prefill(loaded):
    able = [name for name in NAMES if Decoder(loaded(name).decoder, 1).supports_packed_prefill]
    assert {"llama", "mistral", "gemma2", "gemma3_text", "bloom", "gpt2", "llama_genai", "gemma3_genai"} <= set(able)


@pytest.fixture
def computed(monkeypatch, loaded):
    """The tokens, padding included, of each step: (kind, rows · length)."""
    loaded("llama")  # its conversion runs steps too
    sizes: list[tuple[str, int]] = []
    step, packed = CacheSession.step, CacheSession.prefill_packed
    monkeypatch.setattr(
        CacheSession,
        "step",
        lambda session, tokens, *more: sizes.append(("step", tokens.size)) or step(session, tokens, *more),
    )
    monkeypatch.setattr(
        CacheSession,
        "prefill_packed",
        lambda session, prompts, size: sizes.append(("packed", size)) or packed(session, prompts, size),
    )
    return sizes


def assert_same_texts(monkeypatch, model, prompts, seeds, **options):
    """Generates with and without packed prefill, and compares the texts."""
    options = {"eos_token_id": None, "do_sample": False, "max_new_tokens": 4, "token_logprobs": True, **options}
    gen = generation.compile(generation.context(model, **options), len(prompts))
    actual = generation.generate(gen, prompts, seeds)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "supports_packed_prefill", False)
        expected = generation.generate(gen, prompts, seeds)
    assert [[token.id for token in text] for text in actual] == [[token.id for token in text] for text in expected]
    for text, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=3e-4)


OPTIONS = [
    {},
    {"do_sample": True, "temperature": 1.5, "top_k": 0},
    {"num_beams": 3},
    {"num_return_sequences": 2, "do_sample": True},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"kv_bits": 8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_texts_are_those_of_plain_steps(name, options, loaded, monkeypatch):
    assert_same_texts(monkeypatch, loaded(name), PROMPTS, [1, 2, 3, 4], **options)


def test_the_prompts_run_in_one_step_of_their_sum(loaded, monkeypatch, computed):
    assert_same_texts(monkeypatch, loaded("llama"), PROMPTS, [0] * 4, max_new_tokens=1)
    assert sum(map(len, PROMPTS)) == 54
    assert computed == [("packed", 56), ("step", 4 * 32), ("step", 4 * 4), ("step", 4)]


def test_a_prompt_of_a_beam_search_runs_in_one_row_of_one(loaded, monkeypatch, computed):
    assert_same_texts(monkeypatch, loaded("llama"), [PROMPTS[0]], [0], max_new_tokens=1, num_beams=3)
    assert computed == [("packed", 40), ("step", 3 * 32), ("step", 3 * 4), ("step", 3)]


def test_prompts_are_not_packed_where_that_saves_a_quarter_or_less(loaded, monkeypatch, computed):
    model = loaded("llama")
    for prompts in ([PROMPTS[0]], [PROMPTS[0][:16], PROMPTS[3] + PROMPTS[1][:4]], [PROMPTS[0][:16], PROMPTS[3][:8]]):
        assert_same_texts(monkeypatch, model, prompts, [0] * len(prompts), max_new_tokens=1)
    assert "packed" not in dict(computed)


@pytest.mark.parametrize("most", [16, 40, 64])
def test_a_packed_prefill_has_no_more_tokens_than_a_step_may(most, loaded, monkeypatch, computed):
    prompts = [DRAW.integers(3, 60, n).tolist() for n in (14, 3, 9, 2)]
    assert_same_texts(monkeypatch, loaded("llama"), prompts, [0] * 4, max_new_tokens=1, prefill_step_size=most)
    packed_rows = [size for what, size in computed if what == "packed"]
    assert packed_rows == {16: [14, 14], 40: [28], 64: [28]}[most]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_a_packed_prefill_may_follow_one_of_longer_prompts(options, loaded, monkeypatch, computed):
    """In blocks, where the slots of a packed prefill come from a table of all rows."""
    prompts = [DRAW.integers(3, 60, n).tolist() for n in (17, 45, 2, 20)]
    assert_same_texts(monkeypatch, loaded("llama"), prompts, [0] * 4, prefill_step_size=64, **options)
    assert [size for what, size in computed if what == "packed"] == [64, 20]


def test_prompts_whose_beginning_a_cache_has_run_from_there(loaded, computed):
    model = loaded("llama")
    ctx = generation.context(model, eos_token_id=None, do_sample=False, max_new_tokens=1)
    gen, cache = generation.compile(ctx, 4), PromptCache(model)
    generation.generate(gen, PROMPTS, [0] * 4, prompt_cache=cache)
    assert computed == [("packed", 56)]
    generation.generate(gen, PROMPTS, [0] * 4, prompt_cache=cache)
    assert computed[1:] == [("step", 4)]  # of each prompt its last token


def test_packed_prompts_give_the_tokens_of_the_reference(loaded, computed):
    for name in ("llama", "gemma2", "bloom"):
        rows = rows_of(name)
        ctx = generation.context(loaded(name), do_sample=False, eos_token_id=None, max_new_tokens=8)
        actual = generation.generate(generation.compile(ctx, 3), [row["prompt"] for row in rows], [0] * 3)
        for text, expected in zip(actual, tokens_of(rows), strict=True):
            assert [token.id for token in text][: len(expected)] == expected[:8]
    assert [what for what, _ in computed].count("packed") == 3


def test_wrong_packed_prefills_are_refused(loaded):
    decoder = Decoder(loaded("llama").decoder, 2)
    session = decoder.begin_session([8, 4])
    for prompts, size, match in [
        ([[5, 6]], 8, "rows"),
        ([[5, 6], [5] * 5], 8, "at most"),
        ([[5, 6], [7]], 2, "a packed prefill of 2"),
        ([[], []], 2, "1 or more"),
    ]:
        with pytest.raises(DecoderError, match=match):
            session.prefill_packed(prompts, size)
    session.evaluate(session.prefill_packed([[5, 6], []], 2))
    with pytest.raises(DecoderError, match="rows without tokens"):
        session.prefill_packed([[5], []], 2)
    session.evaluate(session.prefill_packed([[], [7, 8]], 2))
    assert session.lengths.tolist() == [2, 2]
    other = Decoder(unrewritten_module("llama"), 1)
    assert not other.supports_packed_prefill
    with pytest.raises(DecoderError, match="over pools"):
        other.begin_session([4]).prefill_packed([[5]], 1)


@settings(max_examples=200)
@given(
    lengths=st.dictionaries(st.integers(0, 40), st.integers(1, 700), min_size=1, max_size=12),
    rows=st.integers(1, 64),
    most=st.none() | st.integers(1, 600),
)
def test_packed_rows_have_each_prompt_once_and_far_fewer_tokens(lengths, rows, most):
    packed_rows, limit = plan_packed_prefill(lengths, rows, most), min(MAX_PACKED_TOKENS, most or MAX_PACKED_TOKENS)
    longest = max(lengths.values())
    if not packed_rows:
        assert longest > limit or 4 * (sum(lengths.values()) * 9 / 8 + len(lengths)) >= 3 * rows * longest
        return
    assert [row for members, _ in packed_rows for row in members] == list(lengths)
    sums = [sum(lengths[row] for row in members) for members, _ in packed_rows]
    assert all(
        total <= size <= min(limit, total * 9 / 8 + 1) for total, (_, size) in zip(sums, packed_rows, strict=True)
    )
    assert 4 * sum(size for _, size in packed_rows) < 3 * rows * longest
