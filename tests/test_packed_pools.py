"""Decoders over 8- and 4-bit pools: one result in every layout, small pools written in place, and how near they stay."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from conftest import NAMES
from decoding import greedy, plain, prefill, rows_of
from quantized_rows import dequantized_rows

from mlx_transmuter import generation, ops
from mlx_transmuter.cache import QuantizedFormat
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule

TEXT = np.random.default_rng(5).integers(3, 60, 60).tolist()


def followed(decoder: Decoder, text: list[int], **pages) -> np.ndarray:
    """The logits [tokens, vocab] after each token of a text, one step each."""
    run = decoder.begin_session([len(text)], **pages)
    found = []
    for token in text:
        logits = run.step(np.array([[token]], np.int32), [1])
        run.evaluate(logits)
        found.append(ops.to_host(logits[0]))
    return np.stack(found)


def by_hand(module: ProgramModule, text: list[int], bits: int) -> np.ndarray:
    """The same from the graph itself, whose past is what numpy reads of the packed presents."""
    decoder = Decoder(module, 1, cache_mode="grow")
    entries, signature = decoder.signature.cache_pairs, decoder.signature
    past = {entry.past: np.zeros(entry.shape_for(1, 0), np.float32) for entry in entries}
    found = []
    for at, token in enumerate(text):
        feed = {name: mx.array(array) for name, array in past.items()}
        feed[signature.token_input] = mx.array([[token]], mx.int32)
        feed |= {signature.mask_input: mx.ones((1, at + 1), mx.int32)} if signature.mask_input else {}
        feed |= {signature.positions_input: mx.array([[at]], mx.int32)} if signature.positions_input else {}
        out = module(**feed)
        found.append(np.array(out["logits"])[0, -1])
        for entry in entries:
            new = mx.array(np.array(out[entry.present])[:, :, -1:])
            packing = QuantizedFormat.choose(bits, 64, entry.head_dim, mx.float32)
            near = dequantized_rows(
                np.array(packing.quantize(new)), bits, packing.group_size, entry.head_dim, np.float32
            )
            past[entry.past] = np.concatenate([past[entry.past], near], axis=2)
    return np.stack(found)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("name", "mode"), [("llama", "append"), ("llama", "grow"), ("opt", "grow")])
def test_a_graph_as_it_is_sees_its_past_through_the_packing(name, mode, bits):
    module = plain(name)
    found = followed(Decoder(module, 1, cache_mode=mode, kv_bits=bits), TEXT[:20])
    wanted = by_hand(module, TEXT[:20], bits)
    assert np.abs(found - wanted).max() <= 1e-4 * np.ptp(wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "llama_genai"])
def test_every_layout_gives_one_result(name, bits, loaded):
    """Runs, pages, parts, ragged rows, forks and drafts: a token's row is the same wherever it lies."""
    module = loaded(name).decoder
    options = {"kv_bits": bits}
    one, three = Decoder(module, 1, **options), Decoder(module, 3, **options)
    text = TEXT[:24]
    wanted = followed(one, text)
    spread = np.ptp(wanted)

    def near(found, at) -> bool:
        return np.abs(found - wanted[at]).max() <= 2e-4 * spread

    assert near(followed(one, text, paged=True), slice(None))
    assert near(prefill(one.begin_session([24]), [text])[0], -1)
    assert near(prefill(three.begin_session([24] * 3), [text, text[:7], text[:16]]), [23, 6, 15])
    run = three.begin_session([24] * 3, paged=True, block_size=5)
    prefill(run, [text[:8], [], []])
    run.fork([0, 0, 0])
    logits = run.step(np.array([text[8:9]] * 3, np.int32), [1, 1, 1])
    run.evaluate(logits)
    assert run.copied_slots > 0
    assert near(ops.to_host(logits), [8] * 3)
    run = one.begin_session([24], paged=True)
    prefill(run, [text[:8]])
    sees = np.tril(np.ones((1, 3, 3), bool))
    logits = run.verify_draft(np.array([text[8:11]], np.int32), sees, np.array([[0, 1, 2]]))
    run.evaluate(logits)
    assert near(ops.to_host(logits)[0], [8, 9, 10])
    run.accept([[0, 1, 2]])
    logits = run.step(np.array([text[11:12]], np.int32), [1])
    run.evaluate(logits)
    assert near(ops.to_host(logits), [11])


NONE = ("deltanet_ort", "gpt2_reread")


@pytest.mark.parametrize("name", NONE)
def test_a_decoder_without_keys_and_values_has_none_to_pack(name, loaded):
    with pytest.raises(DecoderError, match="no keys and values"):
        Decoder(loaded(name).decoder, 1, kv_bits=8)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NONE])
def test_eight_bits_stay_nearer_than_four(name, loaded):
    """And both near: a bound on the logits, of the spread they have."""
    module, rows = loaded(name).decoder, rows_of(name)
    text = [*rows[0]["prompt"], *rows[0]["tokens"]][:40]
    wanted = followed(Decoder(module, 1), text)
    off = {bits: np.abs(followed(Decoder(module, 1, kv_bits=bits), text) - wanted).max() for bits in (4, 8)}
    assert 0 < off[8] < off[4] / 3
    assert off[8] < 0.02 * np.ptp(wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_prompt_cache_and_its_file_hold_packed_rows(bits, loaded, tmp_path):
    model = loaded("llama")
    ctx = generation.context(
        model, eos_token_id=None, do_sample=False, max_new_tokens=6, token_logprobs=True, kv_bits=bits
    )
    gen = generation.compile(ctx, 2)
    prompts = [TEXT[:30], TEXT[:12]]
    wanted = generation.generate(gen, prompts, [0, 0])
    cache = PromptCache(model, kv_bits=bits)
    assert cache.kv_cache.slot_nbytes * 16 == PromptCache(model).kv_cache.slot_nbytes * {4: 6, 8: 10}[bits]
    generation.generate(gen, [TEXT[:20], []], [0, 0], prompt_cache=cache)
    cache.save(tmp_path / "cache")
    for held in (cache, PromptCache.load(tmp_path / "cache", model)):
        assert (held.kv_bits, held.find(TEXT[:30])) == (bits, 20)
        found = generation.generate(gen, prompts, [0, 0], prompt_cache=held)
        assert [[t.id for t in text] for text in found] == [[t.id for t in text] for text in wanted]
        for text, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=1e-3)
    with pytest.raises(GenerationError, match="kv_bits"):
        generation.generate(gen, prompts, [0, 0], prompt_cache=PromptCache(model))


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("pages", [{}, {"paged": True}], ids=["runs", "pages"])
def test_a_step_writes_in_place(pages, loaded):
    """Beside its pools a step holds no more for more slots."""
    decoder = Decoder(loaded("llama").decoder, 1, max_positions=2**20, kv_bits=8)
    extra = []
    for slots in (2**12, 2**17):
        run = decoder.begin_session([slots], **pages)
        greedy(run, [TEXT[:4]], [3])
        size = sum(pool.nbytes for pool in run.pools.arrays)
        most = 0
        for _ in range(3):
            gc.collect()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            logits = run.step(np.array([[5]], np.int32), [1])
            run.evaluate(logits)
            most = max(most, mx.get_peak_memory() - before)
            del logits
        run.close()
        extra.append(most)
    assert extra[1] < size / 8
    assert extra[1] < extra[0] + 2**18


def test_other_bits_are_refused(loaded):
    for wrong in ({"kv_bits": 3}, {"kv_bits": 8, "kv_group_size": 16}):
        with pytest.raises(GenerationError, match="kv_bits"):
            generation.context(Model(loaded("llama").decoder), **wrong)
