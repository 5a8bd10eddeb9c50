"""Drafts: the logits of every guess of a tree, verified in one call, are those of plain steps along its path."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import NAMES
from decoding import plain as unrewritten

from mlx_transmuter import ops
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError


def along(decoder: Decoder, prompt: list[int], path: list[int]) -> np.ndarray:
    """The logits after prompt and path, by plain steps in a run of its own."""
    run = decoder.begin_session([len(prompt) + len(path)])
    logits = run.step(np.array([prompt], np.int32), [len(prompt)])
    for token in path:
        run.evaluate(logits)
        logits = run.step(np.array([[token]], np.int32), [1])
    run.evaluate(logits)
    return ops.to_host(logits[0])


def tree(draw: np.random.Generator, guesses: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """A random tree: sees [n, n], depths [n], and the path from the root to each guess."""
    paths: list[list[int]] = []
    for guess in range(guesses):
        parent = draw.integers(-1, guess) if guess else -1
        paths.append([*(paths[parent] if parent >= 0 else []), guess])
    sees = np.zeros((guesses, guesses), bool)
    for guess, path in enumerate(paths):
        sees[guess, path] = True
    return sees, np.array([len(path) - 1 for path in paths]), paths


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "gpt2", "gpt2_ort", "gpt_oss", "llama_genai"])
def test_a_tree_of_guesses_has_the_logits_of_plain_steps_and_its_kept_path_goes_on(name, block, loaded):
    """In pages of any size: what is kept stays in its slots where a page is one, and else is copied into place."""
    draw = np.random.default_rng(3)
    module = loaded(name).decoder
    plain, decoder = Decoder(module, 1), Decoder(module, 2)
    assert decoder.supports_drafts
    vocab = decoder.vocab_size
    prompts = [draw.integers(vocab // 2, vocab, n).tolist() for n in (9, 4)]
    run = decoder.begin_session([40, 40], paged=True, block_size=block)
    moved = 0
    padded = np.array([prompts[0], prompts[1] + [0] * 5], np.int32)
    run.evaluate(run.step(padded, [9, 4]))
    for guesses in (5, 3):
        tokens = draw.integers(vocab // 2, vocab, (2, guesses)).astype(np.int32)
        trees = [tree(draw, guesses) for _ in range(2)]
        logits = run.verify_draft(tokens, np.stack([t[0] for t in trees]), np.stack([t[1] for t in trees]))
        run.evaluate(logits)
        found = ops.to_host(logits)
        kept = []
        for row, (_, _, paths) in enumerate(trees):
            for guess, path in enumerate(paths):
                want = along(plain, prompts[row], [int(tokens[row, i]) for i in path])
                spread = np.ptp(want)
                assert np.abs(found[row, guess] - want).max() <= 1e-5 * spread, (row, guess)
            kept.append(max(paths, key=len))
            prompts[row] = prompts[row] + [int(tokens[row, i]) for i in kept[row]]
        run.accept(kept)
        moved += sum(map(len, kept))
        assert run.lengths.tolist() == [len(prompt) for prompt in prompts]
    last = draw.integers(vocab // 2, vocab, (2, 1)).astype(np.int32)
    logits = run.step(last, [1, 1])
    run.evaluate(logits)
    for row in range(2):
        want = along(plain, prompts[row], [int(last[row, 0])])
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)
    assert run.copied_slots == (moved if block > 1 else 0)
    held = sum(-(-(len(prompt) + 1) // block) * block for prompt in prompts)
    assert (
        run.block_manager.num_slots - run.block_manager.free_slots == held
    )  # the guesses that were not kept gave their slots back


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama_genai", "gemma"])
def test_guesses_past_the_end_of_a_context_bucket_have_their_own_positions(name, loaded):
    """What the row holds fills a bucket; the guesses after it stand further on."""
    module = loaded(name).decoder
    plain = Decoder(module, 1)
    draw = np.random.default_rng(5)
    prompt, guesses = draw.integers(plain.vocab_size // 2, plain.vocab_size, 64).tolist(), [7, 8, 9]
    run = Decoder(module, 1).begin_session([80], paged=True)
    run.evaluate(run.step(np.array([prompt], np.int32), [64]))
    logits = run.verify_draft(np.array([guesses], np.int32), np.tril(np.ones((1, 3, 3), bool)), np.array([[0, 1, 2]]))
    run.evaluate(logits)
    for guess in range(3):
        want = along(plain, prompt, guesses[: guess + 1])
        assert np.abs(ops.to_host(logits)[0, guess] - want).max() <= 2e-5 * np.ptp(want)


@pytest.mark.parametrize("block", [1, 4])
def test_guesses_after_a_fork_leave_the_other_rows_as_they_are(block, loaded):
    """The rows share a page that is partly filled; each keeps another path, and one of them none."""
    module, draw = loaded("llama").decoder, np.random.default_rng(9)
    plain = Decoder(module, 1)
    prompt = draw.integers(3, 60, 6).tolist()
    run = Decoder(module, 3).begin_session([40] * 3, paged=True, block_size=block)
    run.evaluate(run.step(np.array([prompt, [0] * 6, [0] * 6], np.int32), [6, 0, 0]))
    run.fork([0, 0, 0])
    tokens = draw.integers(3, 60, (3, 3)).astype(np.int32)
    sees = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 3, bool)
    run.evaluate(run.verify_draft(tokens, sees, np.array([[0, 1, 1]] * 3)))
    kept = [[0, 2], [], [0]]
    run.accept(kept)
    texts = [prompt + tokens[row][path].tolist() for row, path in enumerate(kept)]
    last = draw.integers(3, 60, (3, 1)).astype(np.int32)
    logits = run.step(last, [1] * 3)
    run.evaluate(logits)
    for row, text in enumerate(texts):
        want = along(plain, text, [int(last[row, 0])])
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)
    held = {
        tuple(table[: len(text)])
        for table, text in zip(run.row_slots.table(run.lengths, 16).tolist(), texts, strict=True)
    }
    assert len(held) == 3


def test_a_row_may_keep_nothing_and_padding_guesses_store_nothing(loaded):
    module = loaded("llama").decoder
    decoder, plain = Decoder(module, 2), Decoder(module, 1)
    run = decoder.begin_session([20, 20], paged=True)
    run.evaluate(run.step(np.array([[80, 81, 82], [90, 91, 0]], np.int32), [3, 2]))
    sees = np.tril(np.ones((2, 2), bool))[None].repeat(2, axis=0)
    logits = run.verify_draft(np.array([[83, 84], [92, 0]], np.int32), sees, np.array([[0, 1], [0, -1]]))
    run.evaluate(logits)
    want = along(plain, [90, 91], [92])
    assert np.abs(ops.to_host(logits[1, 0]) - want).max() <= 1e-5 * np.ptp(want)
    run.accept([[], [0]])
    logits = run.step(np.array([[85], [93]], np.int32), [1, 1])
    run.evaluate(logits)
    for row, (prompt, path) in enumerate((([80, 81, 82], [85]), ([90, 91, 92], [93]))):
        want = along(plain, prompt, path)
        assert np.abs(ops.to_host(logits[row]) - want).max() <= 1e-5 * np.ptp(want)


def test_a_draft_is_refused_where_it_cannot_be_right(loaded):
    sees, depths = np.ones((1, 1, 1), bool), np.zeros((1, 1), np.int32)
    tokens = np.array([[5]], np.int32)
    unsupported = [name for name in NAMES if not Decoder(loaded(name).decoder, 1).supports_drafts]
    states = "states.*past_conv.0"
    why = {"deltanet_ort": states, "gpt2_reread": "no cache", "lfm2": states}
    assert unsupported == list(why)
    for name, match in why.items():
        with pytest.raises(DecoderError, match=match):
            Decoder(loaded(name).decoder, 1).begin_session([8], paged=True).verify_draft(tokens, sees, depths)
    with pytest.raises(DecoderError, match="attention isn't over pools"):
        Decoder(unrewritten("llama"), 1).begin_session([8], paged=True).verify_draft(tokens, sees, depths)
    decoder = Decoder(loaded("llama").decoder, 1)
    with pytest.raises(DecoderError, match="a paged session, and the last draft accepted"):
        decoder.begin_session([8]).verify_draft(tokens, sees, depths)
    run = decoder.begin_session([1], paged=True)
    run.evaluate(run.step(tokens, [1]))
    with pytest.raises(DecoderError, match="at most"):
        run.verify_draft(tokens, sees, depths)
    with pytest.raises(DecoderError, match="no draft"):
        run.accept([[0]])
