"""Decoders whose attention has windows: a row needs the slots of its window, however long it gets."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import onnxruntime
import pytest
from conftest import FIXTURES, NAMES
from decoding import rows_of, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_transmuter import generation, ops
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.ops.mlx import pooled_attention
from mlx_transmuter.program import Node
from mlx_transmuter.program.attention_nodes import attention_windows, find_attention_windows
from mlx_transmuter.runtime import buckets
from mlx_transmuter.runtime.buckets import Ring, choose_window_context, context_bucket
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.prefill_schedule import prefill_chunks
from mlx_transmuter.runtime.steps.packed_prefill import PackedPrefillStep

pytestmark = pytest.mark.slow

WINDOWED = ["gemma3_genai", "mistral", "mistral_genai"]  # windows of 8 in all layers
MIXED = ["gemma2", "gemma3_text", "gpt_neo", "gpt_oss"]  # in one of two
LAYOUTS = {"runs": {}, "blocks": {"paged": True}, "blocks of 5": {"paged": True, "block_size": 5}}
TEXT = np.random.default_rng(11).integers(3, 60, 250).tolist()
NEAR = 1e-4  # of the logits' range, as the goldens have it


@pytest.fixture
def small(monkeypatch):
    """Rings of 16 slots for a window of 8, so that short texts wrap around them."""
    monkeypatch.setattr(buckets, "SMALLEST_BUCKET", 16)
    assert Ring.for_window(8) == (8, 16)


def truth(name: str, text: list[int]) -> np.ndarray:
    """Returns onnxruntime's logits [tokens, vocab] of the text in one step, without a past."""
    session = onnxruntime.InferenceSession(FIXTURES / name / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {"input_ids": [text], "attention_mask": [[1] * len(text)], "position_ids": [list(range(len(text)))]}
    given = {}
    for value in session.get_inputs():
        if value.name in feed:
            given[value.name] = np.array(feed[value.name], np.int64)
        else:
            sizes = [0 if isinstance(size, str) else size for size in value.shape[1:]]
            given[value.name] = np.zeros([1, *sizes], np.float32)
    return session.run(["logits"], given)[0][0]


def checked(session, expected: np.ndarray, row: int, logits: mx.array) -> None:
    session.evaluate(logits)
    end = int(session.lengths[row]) - 1
    assert np.abs(ops.to_host(logits[row]) - expected[end]).max() <= NEAR * np.ptp(expected[end]), end


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", WINDOWED)
def test_every_logit_of_a_long_text_is_onnxruntimes(name, layout, loaded):
    """A prompt longer than the window in the longest chunks that a ring takes, then single tokens, in two rows."""
    decoder = Decoder(loaded(name).decoder, 2)
    assert decoder.ring == (8, 64)
    expected = truth(name, TEXT)
    session = decoder.begin_session([250, 250], **layout)
    assert isinstance(session, CacheSession)
    slots_used, columns = [], []
    for chunk in [*prefill_chunks(100, session.max_step_tokens), *[1] * 150]:
        at = session.lengths.tolist()
        counts = [min(chunk, 250 - at[0]), min(max(1, chunk // 2), 250 - at[1])]
        tokens = [(TEXT[start : start + count] + [0] * chunk)[:chunk] for start, count in zip(at, counts, strict=True)]
        columns.append(session._step_columns(int((session.lengths + counts).max()), chunk).context)
        logits = session.step(np.array(tokens, np.int32), counts)
        for row in range(2):
            checked(session, expected, row, logits)
        slots_used.append(
            session.block_manager.num_slots - session.block_manager.free_slots
            if layout
            else 2 * session.kv_cache.head_span
        )
    assert max(columns) == 64
    block = layout.get("block_size", 1)
    assert max(slots_used) <= 2 * (64 + 2 * block)
    assert slots_used[-1] <= (2 * (8 + 1 + 2 * block) if layout else 2 * 64)
    assert session.block_manager.num_slots <= 2 * (64 + 2 * block)
    session.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", MIXED)
def test_layers_with_a_window_read_only_it_and_every_logit_is_onnxruntimes(name, layout, loaded, monkeypatch):
    """Steps of several tokens too, in rows of two lengths."""
    widths: list[int] = []
    of = pooled_attention.layer_index
    monkeypatch.setattr(
        pooled_attention, "layer_index", lambda index, seen: widths.append(seen.shape[-1]) or of(index, seen)
    )
    decoder = Decoder(loaded(name).decoder, 2)
    assert (decoder.ring, decoder.max_window) == (None, 8)
    expected = truth(name, TEXT)
    session = decoder.begin_session([250, 250], **layout)
    for chunk in [*prefill_chunks(100), 8, 9, *[1] * 133]:
        at = session.lengths.tolist()
        counts = [min(chunk, 250 - at[0]), min(max(1, chunk // 2), 250 - at[1])]
        tokens = [(TEXT[start : start + count] + [0] * chunk)[:chunk] for start, count in zip(at, counts, strict=True)]
        widths.clear()
        logits = session.step(np.array(tokens, np.int32), counts)
        for row in range(2):
            checked(session, expected, row, logits)
        assert len(widths) == 2  # one layer of each kind
        if chunk == 1:
            context = context_bucket(int(session.lengths.max()))
            assert sorted(widths) == [16, context]
    session.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WINDOWED)
def test_forks_and_drafts_past_many_windows_are_onnxruntimes(name, loaded):
    """Rows that fork and continue each other, and draft trees of which a path is accepted."""
    draw = np.random.default_rng(3)
    module = loaded(name).decoder
    texts = [draw.integers(3, 60, 90).tolist() for _ in range(3)]
    session = Decoder(module, 3).begin_session([140] * 3, paged=True)
    assert isinstance(session, CacheSession)
    known = [text[:20] for text in texts]
    for chunk in prefill_chunks(20, session.max_step_tokens):
        at = int(session.lengths[0])
        session.evaluate(session.step(np.array([text[at : at + chunk] for text in texts], np.int32), [chunk] * 3))
    for turn in range(20):
        parents = draw.integers(0, 3, 3).tolist()
        session.fork(parents)
        known = [list(known[parent]) for parent in parents]
        if turn % 2:
            tokens = draw.integers(3, 60, (3, 1)).astype(np.int32)
            known = [[*text, int(token)] for text, token in zip(known, tokens[:, 0], strict=True)]
            logits = session.step(tokens, [1] * 3)[:, None]
            paths, trees = [[0]] * 3, known
        else:  # node 0, two after it, and one after the second
            tokens = draw.integers(3, 60, (3, 4)).astype(np.int32)
            sees = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
            logits = session.verify_draft(tokens, np.stack([sees] * 3), np.array([[0, 1, 1, 2]] * 3))
            paths = [[[0], [0, 1], [0, 2, 3]][draw.integers(0, 3)] for _ in range(3)]
            trees = [[*text, *row[path].tolist()] for text, row, path in zip(known, tokens, paths, strict=True)]
        session.evaluate(logits)
        if not turn % 2:
            session.accept(paths)
        for row, (text, path) in enumerate(zip(trees, paths, strict=True)):
            expected = truth(name, text)[-1]
            actual = ops.to_host(logits[row, path[-1] if not turn % 2 else 0])
            assert np.abs(actual - expected).max() <= NEAR * np.ptp(expected)
        known = trees
        assert session.block_manager.num_slots - session.block_manager.free_slots <= 3 * (8 + 4)
    assert session.copied_slots == 0
    assert session.lengths.min() > 2 * 16


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", WINDOWED)
def test_the_goldens_wrap_around_the_ring(name, loaded):
    """transformers' tokens, of one prompt, of a ragged batch, with prompt chunks of several sizes."""
    model, rows = loaded(name), rows_of(name)
    for most in (1, 4, 2048):
        ctx = generation.context(
            model, max_new_tokens=max(map(len, tokens_of(rows))), do_sample=False, prefill_step_size=most
        )
        gen = generation.compile(ctx, len(rows))
        assert gen.decoder.ring == (8, 16)
        actual = generation.generate(gen, [row["prompt"] for row in rows], [0] * len(rows))
        assert [[t.id for t in text][: len(w)] for text, w in zip(actual, tokens_of(rows), strict=True)] == tokens_of(
            rows
        )
        for row in rows:
            (tokens,) = generation.generate(generation.compile(ctx, 1), [row["prompt"]], [0])
            assert [token.id for token in tokens][: len(row["tokens"])] == row["tokens"]


def generated(gen, prompts, **more):
    return generation.generate(gen, prompts, list(range(len(prompts))), **more)


def assert_same_texts(actual, expected) -> None:
    assert [[token.id for token in text] for text in actual] == [[token.id for token in text] for text in expected]
    for text, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=2e-4)


OPTIONS = st.sampled_from(
    [
        {},
        {"kv_bits": 8},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True, "top_k": 0},
        {"do_sample": True, "temperature": 1.5, "top_k": 0, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 1000, "max_matching_ngram_size": 1},
        {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0},
        {"num_assistant_tokens": 40, "assistant_confidence_threshold": 0.0, "do_sample": True},
    ]
)


@pytest.mark.usefixtures("small")
@settings(max_examples=36, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["mistral", "gemma2", "gpt_oss"]),
    options=OPTIONS,
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=3).filter(any),
    new=st.integers(1, 40),
    step=st.sampled_from([3, 16, 2048]),
    cached=st.sampled_from([None, 1, 4]),
)
def test_texts_are_those_of_a_cache_without_rings(name, options, lengths, new, step, cached, loaded):
    model = loaded(name)
    if "num_assistant_tokens" in options:
        options = {**options, "assistant_model": model}
    plain = {"eos_token_id": None, "do_sample": False, "token_logprobs": True, "max_new_tokens": new}
    ctx = generation.context(model, **{**plain, "prefill_step_size": step, **options})
    gen, all_kept = generation.compile(ctx, len(lengths)), generation.compile(ctx, len(lengths))
    for each in (all_kept.decoder, *([all_kept.assistant.decoder] if all_kept.assistant else [])):
        each.ring = each.max_window = None
    prompts = [TEXT[:length] for length in lengths]
    expected = generated(all_kept, prompts)
    if cached is None:
        assert_same_texts(generated(gen, prompts), expected)
        return
    cache = PromptCache(model, block=cached, kv_bits=options.get("kv_bits"))
    for _ in range(2):
        assert_same_texts(generated(gen, prompts, prompt_cache=cache), expected)


@pytest.mark.usefixtures("small")
def test_a_packed_prefill_continues_in_rings(loaded):
    """Prompts that are short enough for their rows are packed; longer ones run in chunks."""
    model = loaded("mistral")
    ctx = generation.context(model, max_new_tokens=30, eos_token_id=None, do_sample=False, token_logprobs=True)
    gen, all_kept = (generation.compile(ctx, 6) for _ in range(2))
    all_kept.decoder.ring = all_kept.decoder.max_window = None
    for lengths, packs in (((9, 2, 1, 3, 1, 2), True), ((10, 2, 1, 3, 1, 2), False)):
        prompts = [TEXT[i : i + n] for i, n in enumerate(lengths)]
        assert_same_texts(generated(gen, prompts), generated(all_kept, prompts))
        assert any(isinstance(step, PackedPrefillStep) for step in gen.decoder._compiled_steps) == packs or not packs
    session = gen.decoder.begin_session([40] * 6)
    with pytest.raises(DecoderError, match="at most 9 each"):
        session.prefill_packed([TEXT[:10], [], [], [], [], []], 10)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_row_is_truncated_while_its_window_is_in_the_cache(layout, loaded):
    decoder, expected = Decoder(loaded("mistral").decoder, 1), truth("mistral", TEXT)
    session = decoder.begin_session([250], **layout)
    assert isinstance(session, CacheSession)
    at = 0
    for chunk in prefill_chunks(200, session.max_step_tokens):
        session.evaluate(session.step(np.array([TEXT[at : at + chunk]], np.int32), [chunk]))
        at += chunk
    least = (
        200 - session.row_slots.ring.max_step_tokens if not layout else int(session.row_slots.first_positions()[0]) + 7
    )
    with pytest.raises(DecoderError, match="a window of 8 tokens before"):
        session.truncate([least - 1])
    wrong = np.array([[7] * (200 - least)], np.int32)
    session.truncate([max(least, 195)])
    with pytest.raises(DecoderError, match="a window of 8 tokens before"):
        session.truncate([least - 1])
    session.truncate([least])
    if wrong.size:
        session.evaluate(session.step(wrong, [wrong.size]))
        session.truncate([least])
    for token in TEXT[least : least + 30]:
        checked(session, expected, 0, session.step(np.array([[token]], np.int32), [1]))


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_steps_and_slots_do_not_grow_with_the_length_of_a_row(layout, loaded):
    decoder = Decoder(loaded("mistral").decoder, 1)
    session = decoder.begin_session([2**20], **layout)
    assert isinstance(session, CacheSession)
    size = sum(pool.nbytes for pool in session.pools.arrays)
    assert size < 3 * 64 * session.kv_cache.slot_nbytes
    seen = []
    for count in (100, 300):
        for _ in range(count):
            session.evaluate(session.step(np.array([[5]], np.int32), [1]))
        seen.append(
            (
                decoder.compilations,
                session.block_manager.free_slots,
                session._step_columns(int(session.lengths[0]) + 1, 1),
            )
        )
    assert seen[0] == seen[1]
    assert seen[0][2] == (64, True, 0)
    assert decoder.compilations == 2  # of the ring before it is full, and after


def test_a_step_of_more_tokens_than_a_ring_takes_is_refused(loaded):
    session = Decoder(loaded("mistral").decoder, 1).begin_session([200])
    assert session.max_step_tokens == 57
    with pytest.raises(DecoderError, match="a step of 65 tokens over a window of 8; expected at most 57"):
        session.step(np.array([TEXT[:65]], np.int32), [65])
    assert Decoder(loaded("mistral").decoder, 1).begin_session([64]).max_step_tokens is None  # no row outgrows it


def test_only_decoders_whose_layers_all_have_a_window_have_a_ring(loaded):
    decoders = {name: Decoder(loaded(name).decoder, 1) for name in NAMES}
    assert [name for name, decoder in decoders.items() if decoder.ring] == WINDOWED
    assert [name for name, decoder in decoders.items() if decoder.max_window and not decoder.ring] == MIXED


def test_a_program_with_a_malformed_window_has_no_ring(loaded):
    program = loaded("mistral").decoder.program
    assert find_attention_windows(program) == {8}
    for window in ("8", 0, -3, None):
        nodes = [
            replace(node, attrs={"window": window}) if node.op == "mlx.visible" else node for node in program.nodes
        ]
        assert 0 in find_attention_windows(replace(program, nodes=tuple(nodes)))
    short = Node("mlx.attention", ("q",), ("o",))
    assert find_attention_windows(replace(program, nodes=(*program.nodes, short))) == {0, 8}


@pytest.mark.parametrize(("name", "windows"), [("mistral", [8]), ("gemma2", [0, 8]), ("llama", [0])])
def test_a_conversion_records_the_windows_of_its_attention(name, windows, loaded):
    program = loaded(name).decoder.program
    assert program.metadata["attention_windows"] == windows == sorted(find_attention_windows(program))
    assert attention_windows(replace(program, nodes=())) == set(windows)


@pytest.mark.parametrize("record", [None, 8, "8", ["8"], [8, -1], {"8": 8}])
def test_windows_without_a_record_are_read_off_the_nodes(record, loaded):
    program = loaded("mistral").decoder.program
    metadata = {**program.metadata, "attention_windows": record}
    assert attention_windows(replace(program, metadata=metadata)) == {8}


@pytest.mark.parametrize(
    ("window", "slots"), [(1, 64), (32, 64), (33, 128), (512, 640), (2047, 2560), (4096, 5120), (131072, 163840)]
)
def test_a_ring_has_a_quarter_more_than_its_window(window, slots):
    ring = Ring.for_window(window)
    assert ring == (window, slots)
    assert ring.max_step_tokens >= max(32, window // 4)


@pytest.mark.parametrize(
    ("window", "seq", "context", "paged", "columns"),
    [
        (None, 1, 4096, True, 0),
        (512, 1, 4096, False, 512),
        (512, 1, 1792, False, 0),
        (512, 1, 1792, True, 512),
        (512, 1, 512, True, 0),
        (512, 2, 4096, False, 640),
        (128, 2048, 16384, False, 2304),
        (128, 2048, 8192, False, 0),
    ],
)
def test_layers_read_only_their_window_where_that_is_less(window, seq, context, paged, columns):
    """A gathered column costs as much as four of a run, which is read as it lies, and as one of a block."""
    assert choose_window_context(window, seq, context, paged) == columns
