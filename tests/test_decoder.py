"""Decoder and CacheSession: the cache modes, blocks and forks against the goldens, and what a session refuses."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from decoding import decoded, prefill, rows_of, tokens_of, unrewritten_module

from mlx_transmuter.cache import CacheError
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule

# Rows of different lengths in one batch.

LAYOUTS = [{}, {"paged": True, "block_size": 1}, {"paged": True, "block_size": 3}, {"paged": True, "block_size": 16}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "llama_genai"])
def test_ragged_rows_give_the_tokens_of_the_reference(name, layout, loaded):
    rows = rows_of(name)
    assert decoded(Decoder(loaded(name).decoder, 3), rows, **layout) == tokens_of(rows)


# Rewritten or not, a graph declares one cache mode and may run in others.
MODES = [
    ("llama", "append"), ("mistral", "append"), ("gpt2_ort", "append"), ("llama_genai", "in_place"),
    ("gemma", "grow"), ("opt", "grow"), ("llama", "grow"), ("llama_genai", "grow"),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=str)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_an_unrewritten_graph_gives_the_tokens_of_the_reference_in_each_mode(name, mode, layout):
    rows = rows_of(name)
    decoder = Decoder(unrewritten_module(name), 3, cache_mode=mode)
    assert decoder.cache_mode == mode
    assert len(decoder.group_rows([3, 11, 29])) == (3 if mode == "grow" else 1)
    assert decoded(decoder, rows, **layout) == tokens_of(rows)


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama", "grow"), ("llama_genai", "in_place")]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(name, mode, loaded):
    """A row has the same logits in a batch of one, beside other rows, and beside padding rows."""
    module = loaded(name).decoder if mode is None else unrewritten_module(name)
    prompt = rows_of(name)[1]["prompt"]
    single_row = prefill(Decoder(module, 1, cache_mode=mode).begin_session([40]), [prompt])[0]
    others = [] if mode == "grow" else [[5, 6, 7], prompt[::-1] * 2]
    batch = [[], *others, prompt, []]
    session = Decoder(module, len(batch), cache_mode=mode).begin_session([40 if row else 0 for row in batch])
    actual = prefill(session, batch)[-2]
    assert np.abs(actual - single_row).max() <= 1e-5 * np.ptp(single_row)


def test_rows_that_may_share_a_session_are_one_group(loaded):
    assert Decoder(loaded("llama").decoder, 4).group_rows([5, 0, 3, 5]) == [[0, 2, 3]]
    grow = Decoder(unrewritten_module("llama"), 4, cache_mode="grow")
    assert grow.group_rows([5, 0, 3, 5]) == [[0, 3], [2]]
    assert grow.group_rows([0, 0, 0, 0]) == []


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama_genai", "in_place"), ("gemma", None)]
)
def test_context_past_the_first_bucket(name, mode, loaded):
    """A prompt of 100 tokens has the same logits in chunks, token by token, and in one step."""
    module = loaded(name).decoder if mode is None else unrewritten_module(name)
    decoder = Decoder(module, 1, cache_mode=mode)
    prompt = np.random.default_rng(0).integers(3, 60, 100).tolist()
    one_step = decoder.begin_session([128])
    logits = one_step.step(np.array([prompt + [0] * 28], np.int32), [100])
    one_step.evaluate(logits)
    expected = np.array(logits)[0]
    chunks = prefill(decoder.begin_session([128]), [prompt])[0]
    single = decoder.begin_session([128], paged=True)
    for token in prompt:
        logits = single.step(np.array([[token]], np.int32), [1])
        single.evaluate(logits)
    for actual in (chunks, np.array(logits)[0]):
        assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


# Forks.


def after(module, mode, tokens: list[int]) -> np.ndarray:
    return prefill(Decoder(module, 1, cache_mode=mode).begin_session([len(tokens)]), [tokens])[0]


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama_genai", "in_place"), ("gemma", "grow")]
)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_forked_rows_continue_their_parents_and_share_slots(name, mode, block, loaded):
    module = loaded(name).decoder if mode is None else unrewritten_module(name)
    prompt, draw = rows_of(name)[1]["prompt"], np.random.default_rng(1)
    session = Decoder(module, 3, cache_mode=mode).begin_session([40] * 3, paged=True, block_size=block)
    assert isinstance(session, CacheSession)
    prefill(session, [prompt, [], []])
    texts = [list(prompt), [], []]
    free = []
    for parents in ([0, 0, 0], [2, 0, 0], [1, 1, 2], [0, 1, 2]):
        session.fork(parents)
        free.append(session.block_manager.free_slots)
        texts = [list(texts[parent]) for parent in parents]
        new = draw.integers(3, 60, 3)
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
        logits = session.step(new[:, None].astype(np.int32), [1, 1, 1])
        session.evaluate(logits)
        for row, text in enumerate(texts):
            expected = after(module, mode, text)
            assert np.abs(np.array(logits)[row] - expected).max() <= 1e-4 * np.ptp(expected), (parents, row)
    # Three rows with the same prompt use the slots of one.
    assert free[0] == session.block_manager.num_slots - -(-len(prompt) // block) * block
    assert session.copied_slots == 0 if block == 1 else 0 < session.copied_slots <= 4 * 3 * (block - 1)


def test_rows_that_change_places_share_nothing(loaded):
    """Each row continues in its own last block, without the copy that a forked row makes first."""
    session = Decoder(loaded("llama").decoder, 3).begin_session([40] * 3, paged=True, block_size=8)
    assert isinstance(session, CacheSession)
    prefill(session, [[5, 6, 7], [9, 8, 7], [3, 3, 3]])
    session.fork([2, 0, 1])
    free = session.block_manager.free_slots
    session.evaluate(session.step(np.array([[1], [2], [3]], np.int32), [1, 1, 1]))
    assert (session.copied_slots, session.block_manager.free_slots) == (0, free)


def test_a_fork_copies_no_slots(loaded):
    session = Decoder(loaded("llama").decoder, 2).begin_session([40, 40], paged=True)
    assert isinstance(session, CacheSession)
    prefill(session, [[5, 6, 7], [9, 8, 7]])
    before = [np.array(pool) for pool in session.pools.arrays]
    session.fork([1, 0])
    session.fork([0, 0])
    assert session.copied_slots == 0
    assert all(np.array_equal(old, new) for old, new in zip(before, session.pools.arrays, strict=True))


# What a session refuses.


def test_wrong_sessions_and_steps_are_refused(loaded):
    module = loaded("llama").decoder
    with pytest.raises(DecoderError, match="0 rows"):
        Decoder(module, 0)
    decoder = Decoder(module, 2)
    with pytest.raises(DecoderError, match="1 rows"):
        decoder.begin_session([5])
    with pytest.raises(DecoderError, match="encoder_hidden_states"):
        decoder.begin_session([5, 5], {"encoder_hidden_states": mx.zeros((2, 3, 4))})
    session = decoder.begin_session([5, 0])
    two = np.zeros((2, 2), np.int32)
    for tokens, counts, match in [
        (np.zeros((1, 2), np.int32), [2], "tokens"),
        (two, [2], "counts"),
        (two, [3, 0], "counts"),
        (two, [-1, 0], "counts"),
        (two, [2, 1], "rows of"),  # a token in a padding row
        (np.zeros((2, 8), np.int32), [6, 0], "rows of"),
    ]:
        with pytest.raises(DecoderError, match=match):
            session.step(tokens, counts)
    # A refused step changes nothing.
    session.evaluate(session.step(two, [2, 0]))
    session.evaluate(session.step(two, [2, 0]))
    with pytest.raises(DecoderError, match="at most"):
        session.step(two, [2, 0])
    with pytest.raises(DecoderError, match="paged"):
        session.fork([0, 0])
    session.close()
    with pytest.raises(CacheError):
        session.step(two, [1, 0])


def test_rows_of_different_lengths_are_refused_where_the_cache_grows():
    session = Decoder(unrewritten_module("llama"), 2, cache_mode="grow").begin_session([5, 5])
    session.evaluate(session.step(np.zeros((2, 2), np.int32), [2, 1]))
    with pytest.raises(DecoderError, match="rows of one length"):
        session.step(np.zeros((2, 1), np.int32), [1, 1])


def test_positions_of_the_caller_reach_the_graph(loaded):
    """Positions that equal the tokens' indices change nothing; others change the logits."""
    for module, mode in ((loaded("llama").decoder, None), (unrewritten_module("llama"), "append")):
        actual = []
        for positions in (None, np.arange(4, dtype=np.int32)[None], np.arange(4, dtype=np.int32)[None] * 2):
            session = Decoder(module, 1, cache_mode=mode).begin_session([4])
            logits = session.step(np.array([[5, 6, 7, 8]], np.int32), [4], positions)
            session.evaluate(logits)
            actual.append(np.array(logits))
        assert np.array_equal(actual[0], actual[1])
        assert not np.allclose(actual[0], actual[2])


@pytest.mark.parametrize(
    "meta", [{"cache_mode": "sideways"}, {"cache_mode": 3}, {"trained_length": "many"}, {"trained_length": -1}]
)
def test_a_program_with_malformed_metadata_runs_as_its_graph_declares(meta):
    module = unrewritten_module("llama")
    program = replace(module.program, metadata={**module.program.metadata, **meta})
    rows = rows_of("llama")[:1]
    assert decoded(Decoder(ProgramModule(program, module.weights()), 1), rows) == tokens_of(rows)


@pytest.mark.parametrize("layout", [{}, {"paged": True}, {"paged": True, "block_size": 4}])
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "as it is"])
def test_a_truncated_row_continues_as_if_it_had_never_been_longer(name, layout, loaded):
    decoder = Decoder(unrewritten_module("llama") if name == "as it is" else loaded(name).decoder, 2)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(decoder.vocab_size // 2, decoder.vocab_size, n).tolist() for n in (13, 6)]
    wrong = draw.integers(decoder.vocab_size // 2, decoder.vocab_size, (2, 5)).astype(np.int32)
    right = draw.integers(decoder.vocab_size // 2, decoder.vocab_size, (2, 2)).astype(np.int32)
    straight, session = (decoder.begin_session([30, 30], **layout) for _ in range(2))
    assert isinstance(straight, CacheSession)
    assert isinstance(session, CacheSession)
    for each in (straight, session):
        prefill(each, prompts)
    session.evaluate(session.step(wrong, [5, 3]))
    free = straight.block_manager.free_slots
    session.truncate([13, 6])
    assert session.block_manager.free_slots == free
    actual = [each.step(right, [2, 1]) for each in (straight, session)]
    for each, logits in zip((straight, session), actual, strict=True):
        each.evaluate(logits)
    np.testing.assert_array_equal(*map(np.array, actual))
    with pytest.raises(DecoderError, match="at most"):
        session.truncate([16, 0])
