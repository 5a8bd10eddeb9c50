"""Decoders over 8- and 4-bit pools: the same logits in every layout, in-place writes, and bounds of the error."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from conftest import NAMES
from decoding import greedy, prefill, rows_of, unrewritten_module
from quantized_rows import dequantized_rows

from mlx_transmuter import generation, ops
from mlx_transmuter.cache import QuantizedFormat
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule

pytestmark = pytest.mark.slow

TEXT = np.random.default_rng(5).integers(3, 60, 60).tolist()


def logits_of_steps(decoder: Decoder, text: list[int], **options) -> np.ndarray:
    """The logits [tokens, vocab] after each token of a text, in steps of one token."""
    session = decoder.begin_session([len(text)], **options)
    logits_after = []
    for token in text:
        logits = session.step(np.array([[token]], np.int32), [1])
        session.evaluate(logits)
        logits_after.append(ops.to_host(logits[0]))
    return np.stack(logits_after)


def logits_of_graph_calls(module: ProgramModule, text: list[int], bits: int) -> np.ndarray:
    """The logits from calls of the graph itself, whose past numpy reads from the quantized presents."""
    decoder = Decoder(module, 1, cache_mode="grow")
    entries, signature = decoder.signature.cache_pairs, decoder.signature
    past = {entry.past: np.zeros(entry.shape_for(1, 0), np.float32) for entry in entries}
    logits_after = []
    for position, token in enumerate(text):
        feed = {name: mx.array(array) for name, array in past.items()}
        feed[signature.token_input] = mx.array([[token]], mx.int32)
        feed |= {signature.mask_input: mx.ones((1, position + 1), mx.int32)} if signature.mask_input else {}
        feed |= {signature.positions_input: mx.array([[position]], mx.int32)} if signature.positions_input else {}
        out = module(**feed)
        logits_after.append(np.array(out["logits"])[0, -1])
        for entry in entries:
            new = mx.array(np.array(out[entry.present])[:, :, -1:])
            quantized_format = QuantizedFormat.choose(bits, 64, entry.head_dim, mx.float32)
            rows, group_size = np.array(quantized_format.quantize(new)), quantized_format.group_size
            dequantized = dequantized_rows(rows, bits, group_size, entry.head_dim, np.float32)
            past[entry.past] = np.concatenate([past[entry.past], dequantized], axis=2)
    return np.stack(logits_after)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("name", "mode"), [("llama", "append"), ("llama", "grow"), ("opt", "grow")])
def test_a_graph_without_rewrites_reads_a_quantized_past(name, mode, bits):
    module = unrewritten_module(name)
    logits = logits_of_steps(Decoder(module, 1, cache_mode=mode, kv_bits=bits), TEXT[:20])
    expected = logits_of_graph_calls(module, TEXT[:20], bits)
    assert np.abs(logits - expected).max() <= 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom", "llama_genai"])
def test_the_logits_are_the_same_in_every_layout(name, bits, loaded):
    """Runs, blocks, chunks, ragged rows, forks and drafts: a token's quantized row does not depend on its slot."""
    module = loaded(name).decoder
    options = {"kv_bits": bits}
    decoder, three_rows = Decoder(module, 1, **options), Decoder(module, 3, **options)
    text = TEXT[:24]
    expected = logits_of_steps(decoder, text)
    tolerance = 2e-4 * np.ptp(expected)

    def assert_near(logits, positions) -> None:
        assert np.abs(logits - expected[positions]).max() <= tolerance

    assert_near(logits_of_steps(decoder, text, paged=True), slice(None))
    assert_near(prefill(decoder.begin_session([24]), [text])[0], -1)
    assert_near(prefill(three_rows.begin_session([24] * 3), [text, text[:7], text[:16]]), [23, 6, 15])
    session = three_rows.begin_session([24] * 3, paged=True, block_size=5)
    prefill(session, [text[:8], [], []])
    session.fork([0, 0, 0])
    logits = session.step(np.array([text[8:9]] * 3, np.int32), [1, 1, 1])
    session.evaluate(logits)
    assert session.copied_slots > 0
    assert_near(ops.to_host(logits), [8] * 3)
    session = decoder.begin_session([24], paged=True)
    prefill(session, [text[:8]])
    ancestor_mask = np.tril(np.ones((1, 3, 3), bool))
    logits = session.verify_draft(np.array([text[8:11]], np.int32), ancestor_mask, np.array([[0, 1, 2]]))
    session.evaluate(logits)
    assert_near(ops.to_host(logits)[0], [8, 9, 10])
    session.accept([[0, 1, 2]])
    logits = session.step(np.array([text[11:12]], np.int32), [1])
    session.evaluate(logits)
    assert_near(ops.to_host(logits), [11])


WITHOUT_KEYS_AND_VALUES = ("deltanet_ort", "gpt2_reread")


@pytest.mark.parametrize("name", WITHOUT_KEYS_AND_VALUES)
def test_a_decoder_without_keys_and_values_refuses_kv_bits(name, loaded):
    with pytest.raises(DecoderError, match="no keys and values"):
        Decoder(loaded(name).decoder, 1, kv_bits=8)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_KEYS_AND_VALUES])
def test_eight_bits_have_a_smaller_error_than_four(name, loaded):
    """The error of 8 bits has a bound, relative to the range of the logits."""
    module, rows = loaded(name).decoder, rows_of(name)
    text = [*rows[0]["prompt"], *rows[0]["tokens"]][:40]
    expected = logits_of_steps(Decoder(module, 1), text)
    logits = {bits: logits_of_steps(Decoder(module, 1, kv_bits=bits), text) for bits in (4, 8)}
    errors = {bits: np.abs(logits[bits] - expected).max() for bits in logits}
    assert 0 < errors[8] < errors[4] / 3
    assert errors[8] < 0.02 * np.ptp(expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_prompt_cache_and_its_file_have_quantized_rows(bits, loaded, tmp_path):
    model = loaded("llama")
    ctx = generation.context(
        model, eos_token_id=None, do_sample=False, max_new_tokens=6, token_logprobs=True, kv_bits=bits
    )
    gen = generation.compile(ctx, 2)
    prompts = [TEXT[:30], TEXT[:12]]
    expected = generation.generate(gen, prompts, [0, 0])
    cache = PromptCache(model, kv_bits=bits)
    assert cache.kv_cache.slot_nbytes * 16 == PromptCache(model).kv_cache.slot_nbytes * {4: 6, 8: 10}[bits]
    generation.generate(gen, [TEXT[:20], []], [0, 0], prompt_cache=cache)
    cache.save(tmp_path / "cache")
    for prompt_cache in (cache, PromptCache.load(tmp_path / "cache", model)):
        assert (prompt_cache.kv_bits, prompt_cache.find(TEXT[:30])) == (bits, 20)
        texts = generation.generate(gen, prompts, [0, 0], prompt_cache=prompt_cache)
        assert [[t.id for t in text] for text in texts] == [[t.id for t in text] for text in expected]
        for text, other in zip(texts, expected, strict=True):
            np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=1e-3)
    with pytest.raises(GenerationError, match="kv_bits"):
        generation.generate(gen, prompts, [0, 0], prompt_cache=PromptCache(model))


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("options", [{}, {"paged": True}], ids=["runs", "blocks"])
def test_a_step_writes_in_place(options, loaded):
    """Beside its pools a step allocates no more for more slots."""
    decoder = Decoder(loaded("llama").decoder, 1, kv_bits=8)
    decoder.trained_length = 2**17  # for so many tokens there are slots at once
    extra = []
    for slots in (2**12, 2**17):
        session = decoder.begin_session([slots], **options)
        assert isinstance(session, CacheSession)
        greedy(session, [TEXT[:4]], [3])
        size = sum(pool.nbytes for pool in session.pools.arrays)
        peak = 0
        for _ in range(3):
            gc.collect()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            logits = session.step(np.array([[5]], np.int32), [1])
            session.evaluate(logits)
            peak = max(peak, mx.get_peak_memory() - before)
            del logits
        session.close()
        extra.append(peak)
    assert extra[1] < size / 8
    assert extra[1] < extra[0] + 2**18


def test_other_bits_and_group_sizes_raise(loaded):
    for options in ({"kv_bits": 3}, {"kv_bits": 8, "kv_group_size": 16}):
        with pytest.raises(GenerationError, match="kv_bits"):
            generation.context(Model(loaded("llama").decoder), **options)
