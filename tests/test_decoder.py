"""Decoder: the cache modes, pages and forks against the goldens, and what a run refuses."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from decoding import decoded, plain, prefill, rows_of, tokens_of

from mlx_transmuter.cache import CacheError
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule

# Rows of different lengths in one batch.

PAGES = [{}, {"paged": True, "block_size": 1}, {"paged": True, "block_size": 3}, {"paged": True, "block_size": 16}]


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "llama_genai"])
def test_ragged_rows_give_the_tokens_of_the_reference(name, pages, loaded):
    rows = rows_of(name)
    assert decoded(Decoder(loaded(name).decoder, 3), rows, **pages) == tokens_of(rows)


# Rewritten or not, a graph declares one mode and may run in others.
MODES = [
    ("llama", "append"), ("mistral", "append"), ("gpt2_ort", "append"), ("llama_genai", "in_place"),
    ("gemma", "grow"), ("opt", "grow"), ("llama", "grow"), ("llama_genai", "grow"),
]  # fmt: skip


@pytest.mark.parametrize("pages", PAGES[::2], ids=str)
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_graph_as_it_is_gives_them_in_each_mode(name, mode, pages):
    rows = rows_of(name)
    decoder = Decoder(plain(name), 3, cache_mode=mode)
    assert decoder.cache_mode == mode
    assert len(decoder.group_rows([3, 11, 29])) == (3 if mode == "grow" else 1)
    assert decoded(decoder, rows, **pages) == tokens_of(rows)


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama", "grow"), ("llama_genai", "in_place")]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(name, mode, loaded):
    """Alone, with others, and beside padding rows its logits are the same."""
    module = loaded(name).decoder if mode is None else plain(name)
    prompt = rows_of(name)[1]["prompt"]
    alone = prefill(Decoder(module, 1, cache_mode=mode).begin_session([40]), [prompt])[0]
    others = [] if mode == "grow" else [[5, 6, 7], prompt[::-1] * 2]
    batch = [[], *others, prompt, []]
    run = Decoder(module, len(batch), cache_mode=mode).begin_session([40 if row else 0 for row in batch])
    found = prefill(run, batch)[-2]
    assert np.abs(found - alone).max() <= 1e-5 * np.ptp(alone)


def test_groups_are_rows_that_may_share_a_run(loaded):
    assert Decoder(loaded("llama").decoder, 4).group_rows([5, 0, 3, 5]) == [[0, 2, 3]]
    grow = Decoder(plain("llama"), 4, cache_mode="grow")
    assert grow.group_rows([5, 0, 3, 5]) == [[0, 3], [2]]
    assert grow.group_rows([0, 0, 0, 0]) == []


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama_genai", "in_place"), ("gemma", None)]
)
def test_context_past_the_first_bucket(name, mode, loaded):
    """A prompt of 100 tokens in parts, and in parts of one, meets the same logits as in one step."""
    module = loaded(name).decoder if mode is None else plain(name)
    decoder = Decoder(module, 1, cache_mode=mode)
    prompt = np.random.default_rng(0).integers(3, 60, 100).tolist()
    whole = decoder.begin_session([128])
    logits = whole.step(np.array([prompt + [0] * 28], np.int32), [100])
    whole.evaluate(logits)
    wanted = np.array(logits)[0]
    parts = prefill(decoder.begin_session([128]), [prompt])[0]
    single = decoder.begin_session([128], paged=True)
    for token in prompt:
        logits = single.step(np.array([[token]], np.int32), [1])
        single.evaluate(logits)
    for found in (parts, np.array(logits)[0]):
        assert np.abs(found - wanted).max() <= 1e-4 * np.ptp(wanted)


# Forks.


def after(module, mode, tokens: list[int]) -> np.ndarray:
    return prefill(Decoder(module, 1, cache_mode=mode).begin_session([len(tokens)]), [tokens])[0]


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", None), ("llama", "append"), ("llama_genai", "in_place"), ("gemma", "grow")]
)
@pytest.mark.parametrize("block", [1, 3, 16])
def test_forked_rows_continue_their_parents_and_share_slots(name, mode, block, loaded):
    module = loaded(name).decoder if mode is None else plain(name)
    prompt, draw = rows_of(name)[1]["prompt"], np.random.default_rng(1)
    run = Decoder(module, 3, cache_mode=mode).begin_session([40] * 3, paged=True, block_size=block)
    prefill(run, [prompt, [], []])
    texts = [list(prompt), [], []]
    free = []
    for parents in ([0, 0, 0], [2, 0, 0], [1, 1, 2], [0, 1, 2]):
        run.fork(parents)
        free.append(run.block_manager.free_slots)
        texts = [list(texts[parent]) for parent in parents]
        new = draw.integers(3, 60, 3)
        for text, token in zip(texts, new.tolist(), strict=True):
            text.append(token)
        logits = run.step(new[:, None].astype(np.int32), [1, 1, 1])
        run.evaluate(logits)
        for row, text in enumerate(texts):
            wanted = after(module, mode, text)
            assert np.abs(np.array(logits)[row] - wanted).max() <= 1e-4 * np.ptp(wanted), (parents, row)
    # Three rows of the prompt take the slots of one.
    assert free[0] == run.block_manager.num_slots - -(-len(prompt) // block) * block
    assert run.copied_slots == 0 if block == 1 else 0 < run.copied_slots <= 4 * 3 * (block - 1)


def test_rows_that_change_places_share_nothing(loaded):
    """Each row goes on in its own last page, which one that was forked would copy first."""
    run = Decoder(loaded("llama").decoder, 3).begin_session([40] * 3, paged=True, block_size=8)
    prefill(run, [[5, 6, 7], [9, 8, 7], [3, 3, 3]])
    run.fork([2, 0, 1])
    free = run.block_manager.free_slots
    run.evaluate(run.step(np.array([[1], [2], [3]], np.int32), [1, 1, 1]))
    assert (run.copied_slots, run.block_manager.free_slots) == (0, free)


def test_a_fork_moves_nothing(loaded):
    run = Decoder(loaded("llama").decoder, 2).begin_session([40, 40], paged=True)
    prefill(run, [[5, 6, 7], [9, 8, 7]])
    before = [np.array(pool) for pool in run.pools.arrays]
    run.fork([1, 0])
    run.fork([0, 0])
    assert run.copied_slots == 0
    assert all(np.array_equal(old, new) for old, new in zip(before, run.pools.arrays, strict=True))


# What a run refuses.


def test_wrong_runs_and_steps_are_refused(loaded):
    module = loaded("llama").decoder
    with pytest.raises(DecoderError, match="0 rows"):
        Decoder(module, 0)
    decoder = Decoder(module, 2)
    with pytest.raises(DecoderError, match="1 rows"):
        decoder.begin_session([5])
    with pytest.raises(DecoderError, match="encoder_hidden_states"):
        decoder.begin_session([5, 5], {"encoder_hidden_states": mx.zeros((2, 3, 4))})
    run = decoder.begin_session([5, 0])
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
            run.step(tokens, counts)
    # What was refused changed nothing.
    run.evaluate(run.step(two, [2, 0]))
    run.evaluate(run.step(two, [2, 0]))
    with pytest.raises(DecoderError, match="at most"):
        run.step(two, [2, 0])
    with pytest.raises(DecoderError, match="paged"):
        run.fork([0, 0])
    run.close()
    with pytest.raises(CacheError):
        run.step(two, [1, 0])


def test_rows_of_different_lengths_are_refused_where_the_cache_grows():
    run = Decoder(plain("llama"), 2, cache_mode="grow").begin_session([5, 5])
    run.evaluate(run.step(np.zeros((2, 2), np.int32), [2, 1]))
    with pytest.raises(DecoderError, match="rows of one length"):
        run.step(np.zeros((2, 1), np.int32), [1, 1])


def test_positions_may_be_given(loaded):
    """Given positions are the ones that the graph gets: those of the tokens' own places change nothing, others do."""
    for module, mode in ((loaded("llama").decoder, None), (plain("llama"), "append")):
        found = []
        for places in (None, np.arange(4, dtype=np.int32)[None], np.arange(4, dtype=np.int32)[None] * 2):
            run = Decoder(module, 1, cache_mode=mode).begin_session([4])
            logits = run.step(np.array([[5, 6, 7, 8]], np.int32), [4], places)
            run.evaluate(logits)
            found.append(np.array(logits))
        assert np.array_equal(found[0], found[1])
        assert not np.allclose(found[0], found[2])


@pytest.mark.parametrize(
    "meta", [{"cache_mode": "sideways"}, {"cache_mode": 3}, {"max_positions": "many"}, {"max_positions": -1}]
)
def test_a_program_that_says_nonsense_of_itself_runs_as_its_graph_declares(meta):
    module = plain("llama")
    program = replace(module.program, metadata={**module.program.metadata, **meta})
    rows = rows_of("llama")[:1]
    assert decoded(Decoder(ProgramModule(program, module.weights()), 1), rows) == tokens_of(rows)


@pytest.mark.parametrize("pages", [{}, {"paged": True}, {"paged": True, "block_size": 4}])
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "as it is"])
def test_a_row_set_back_goes_on_as_if_it_had_never_been_further(name, pages, loaded):
    decoder = Decoder(plain("llama") if name == "as it is" else loaded(name).decoder, 2)
    draw = np.random.default_rng(5)
    prompts = [draw.integers(decoder.vocab_size // 2, decoder.vocab_size, n).tolist() for n in (13, 6)]
    wrong = draw.integers(decoder.vocab_size // 2, decoder.vocab_size, (2, 5)).astype(np.int32)
    right = draw.integers(decoder.vocab_size // 2, decoder.vocab_size, (2, 2)).astype(np.int32)
    straight, run = (decoder.begin_session([30, 30], **pages) for _ in range(2))
    for each in (straight, run):
        prefill(each, prompts)
    run.evaluate(run.step(wrong, [5, 3]))
    free = straight.block_manager.free_slots
    run.truncate([13, 6])
    assert run.block_manager.free_slots == free
    found = [each.step(right, [2, 1]) for each in (straight, run)]
    for each, logits in zip((straight, run), found, strict=True):
        each.evaluate(logits)
    np.testing.assert_array_equal(*map(np.array, found))
    with pytest.raises(DecoderError, match="at most"):
        run.truncate([16, 0])
