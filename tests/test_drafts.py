"""Drafts: the logits after every token of a draft tree, verified in one step, are those of plain steps along its path."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import NAMES
from decoding import unrewritten_module

from mlx_transmuter import ops
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError


def along(decoder: Decoder, prompt: list[int], path: list[int]) -> np.ndarray:
    """Returns the logits after prompt and path, by plain steps in a session of its own."""
    session = decoder.begin_session([len(prompt) + len(path)])
    logits = session.step(np.array([prompt], np.int32), [len(prompt)])
    for token in path:
        session.evaluate(logits)
        logits = session.step(np.array([[token]], np.int32), [1])
    session.evaluate(logits)
    return ops.to_host(logits[0])


def tree(draw: np.random.Generator, draft_tokens: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Returns a random draft tree: ancestor mask [n, n], depths [n], and the path from the root to each token."""
    paths: list[list[int]] = []
    for node in range(draft_tokens):
        parent = draw.integers(-1, node) if node else -1
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    ancestor_mask = np.zeros((draft_tokens, draft_tokens), bool)
    for node, path in enumerate(paths):
        ancestor_mask[node, path] = True
    return ancestor_mask, np.array([len(path) - 1 for path in paths]), paths


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "gpt2", "gpt2_ort", "gpt_oss", "llama_genai"])
def test_a_draft_tree_has_the_logits_of_plain_steps_and_its_accepted_path_continues(name, block, loaded):
    """In blocks of any size: accepted tokens stay in their slots where a block is one slot, else they are copied."""
    draw = np.random.default_rng(3)
    module = loaded(name).decoder
    plain, decoder = Decoder(module, 1), Decoder(module, 2)
    assert decoder.supports_drafts
    vocab = decoder.vocab_size
    prompts = [draw.integers(vocab // 2, vocab, n).tolist() for n in (9, 4)]
    session = decoder.begin_session([40, 40], paged=True, block_size=block)
    assert isinstance(session, CacheSession)
    moved = 0
    padded = np.array([prompts[0], prompts[1] + [0] * 5], np.int32)
    session.evaluate(session.step(padded, [9, 4]))
    for draft_tokens in (5, 3):
        tokens = draw.integers(vocab // 2, vocab, (2, draft_tokens)).astype(np.int32)
        trees = [tree(draw, draft_tokens) for _ in range(2)]
        logits = session.verify_draft(tokens, np.stack([t[0] for t in trees]), np.stack([t[1] for t in trees]))
        session.evaluate(logits)
        actual = ops.to_host(logits)
        accepted = []
        for row, (_, _, paths) in enumerate(trees):
            for node, path in enumerate(paths):
                want = along(plain, prompts[row], [int(tokens[row, i]) for i in path])
                spread = np.ptp(want)
                assert np.abs(actual[row, node] - want).max() <= 1e-5 * spread, (row, node)
            accepted.append(max(paths, key=len))
            prompts[row] = prompts[row] + [int(tokens[row, i]) for i in accepted[row]]
        session.accept(accepted)
        moved += sum(map(len, accepted))
        assert session.lengths.tolist() == [len(prompt) for prompt in prompts]
    last = draw.integers(vocab // 2, vocab, (2, 1)).astype(np.int32)
    logits = session.step(last, [1, 1])
    session.evaluate(logits)
    for row in range(2):
        want = along(plain, prompts[row], [int(last[row, 0])])
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)
    assert session.copied_slots == (moved if block > 1 else 0)
    slots_used = sum(-(-(len(prompt) + 1) // block) * block for prompt in prompts)
    assert (
        session.block_manager.num_slots - session.block_manager.free_slots == slots_used
    )  # the slots of rejected draft tokens are free


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama_genai", "gemma"])
def test_draft_tokens_past_the_end_of_a_context_bucket_have_their_own_positions(name, loaded):
    """The row's tokens fill a bucket; the draft tokens have positions beyond it."""
    module = loaded(name).decoder
    plain = Decoder(module, 1)
    draw = np.random.default_rng(5)
    prompt, draft_tokens = draw.integers(plain.vocab_size // 2, plain.vocab_size, 64).tolist(), [7, 8, 9]
    session = Decoder(module, 1).begin_session([80], paged=True)
    session.evaluate(session.step(np.array([prompt], np.int32), [64]))
    logits = session.verify_draft(
        np.array([draft_tokens], np.int32), np.tril(np.ones((1, 3, 3), bool)), np.array([[0, 1, 2]])
    )
    session.evaluate(logits)
    for node in range(3):
        want = along(plain, prompt, draft_tokens[: node + 1])
        assert np.abs(ops.to_host(logits)[0, node] - want).max() <= 2e-5 * np.ptp(want)


@pytest.mark.parametrize("block", [1, 4])
def test_drafts_after_a_fork_leave_the_other_rows_unchanged(block, loaded):
    """The rows share a block that is partly filled; each accepts another path, and one of them none."""
    module, draw = loaded("llama").decoder, np.random.default_rng(9)
    plain = Decoder(module, 1)
    prompt = draw.integers(3, 60, 6).tolist()
    session = Decoder(module, 3).begin_session([40] * 3, paged=True, block_size=block)
    assert isinstance(session, CacheSession)
    session.evaluate(session.step(np.array([prompt, [0] * 6, [0] * 6], np.int32), [6, 0, 0]))
    session.fork([0, 0, 0])
    tokens = draw.integers(3, 60, (3, 3)).astype(np.int32)
    ancestor_mask = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 3, bool)
    session.evaluate(session.verify_draft(tokens, ancestor_mask, np.array([[0, 1, 1]] * 3)))
    accepted = [[0, 2], [], [0]]
    session.accept(accepted)
    texts = [prompt + tokens[row][path].tolist() for row, path in enumerate(accepted)]
    last = draw.integers(3, 60, (3, 1)).astype(np.int32)
    logits = session.step(last, [1] * 3)
    session.evaluate(logits)
    for row, text in enumerate(texts):
        want = along(plain, text, [int(last[row, 0])])
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)
    slots_used = {
        tuple(table[: len(text)])
        for table, text in zip(session.row_slots.table(session.lengths, 16).tolist(), texts, strict=True)
    }
    assert len(slots_used) == 3


def test_a_row_may_accept_nothing_and_padding_stores_nothing(loaded):
    module = loaded("llama").decoder
    decoder, plain = Decoder(module, 2), Decoder(module, 1)
    session = decoder.begin_session([20, 20], paged=True)
    session.evaluate(session.step(np.array([[80, 81, 82], [90, 91, 0]], np.int32), [3, 2]))
    ancestor_mask = np.tril(np.ones((2, 2), bool))[None].repeat(2, axis=0)
    logits = session.verify_draft(np.array([[83, 84], [92, 0]], np.int32), ancestor_mask, np.array([[0, 1], [0, -1]]))
    session.evaluate(logits)
    want = along(plain, [90, 91], [92])
    assert np.abs(ops.to_host(logits[1, 0]) - want).max() <= 1e-5 * np.ptp(want)
    session.accept([[], [0]])
    logits = session.step(np.array([[85], [93]], np.int32), [1, 1])
    session.evaluate(logits)
    for row, (prompt, path) in enumerate((([80, 81, 82], [85]), ([90, 91, 92], [93]))):
        want = along(plain, prompt, path)
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)


@pytest.mark.slow
def test_a_draft_is_refused_where_it_cannot_be_right(loaded):
    ancestor_mask, depths = np.ones((1, 1, 1), bool), np.zeros((1, 1), np.int32)
    tokens = np.array([[5]], np.int32)
    unsupported = [name for name in NAMES if not Decoder(loaded(name).decoder, 1).supports_drafts]
    states = "states.*past_conv.0"
    why = {"deltanet_ort": states, "gpt2_reread": "no cache", "lfm2": states}
    assert unsupported == list(why)
    for name, match in why.items():
        with pytest.raises(DecoderError, match=match):
            Decoder(loaded(name).decoder, 1).begin_session([8], paged=True).verify_draft(tokens, ancestor_mask, depths)
    with pytest.raises(DecoderError, match="attention isn't over pools"):
        Decoder(unrewritten_module("llama"), 1).begin_session([8], paged=True).verify_draft(
            tokens, ancestor_mask, depths
        )
    decoder = Decoder(loaded("llama").decoder, 1)
    with pytest.raises(DecoderError, match="a paged session, and the last draft accepted"):
        decoder.begin_session([8]).verify_draft(tokens, ancestor_mask, depths)
    session = decoder.begin_session([1], paged=True)
    session.evaluate(session.step(tokens, [1]))
    with pytest.raises(DecoderError, match="at most"):
        session.verify_draft(tokens, ancestor_mask, depths)
    with pytest.raises(DecoderError, match="no draft"):
        session.accept([[0]])
