"""Length switches: rows that pass the length at which a graph's keys change are computed anew, each as if it were alone.

The truth is onnxruntime over a row's whole text, and transformers' generate in the goldens, which is the same.
"""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import pytest
from conftest import FIXTURES, golden
from decoding import unrewritten_module

from mlx_transmuter import generation, ops
from mlx_transmuter.cache import KVCache
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.program.length_switches import LengthSwitches
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.length_switch_session import LengthSwitchSession

NAMES = ["phi3_longrope", "phi3_longrope_partial"]
SWITCH, VOCAB = 32, 128
NEAR = 1e-4  # of the logits' range, as the goldens have it


@functools.cache
def onnx_session(name: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(FIXTURES / name / "model.onnx"), providers=["CPUExecutionProvider"])


@functools.cache
def logits_after(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    """The logits [vocab] of onnxruntime after a text that it runs at once."""
    session = onnx_session(name)
    feed: dict[str, np.ndarray] = {
        "input_ids": np.array([tokens], np.int64),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
    }
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feed[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    return np.asarray(session.run(["logits"], feed)[0])[0, -1]


def assert_near(name: str, logits: np.ndarray, tokens: list[int]) -> None:
    expected = logits_after(name, tuple(tokens))
    error = np.abs(logits - expected).max() / np.ptp(expected)
    assert error <= NEAR, f"after {len(tokens)} tokens: {error:.1e}"


def run(model, prompts, *, seeds=None, cache=None, max_new_tokens=24, **settings):
    """Returns the tokens after the prompts, in one batch, and how many steps were compiled."""
    ctx = generation.context(model, max_new_tokens=max_new_tokens, **settings)
    compiled = generation.compile(ctx, len(prompts))
    kwargs = {} if cache is None else {"prompt_cache": cache}
    rows = generation.generate(compiled, prompts, seeds or [0] * len(prompts), **kwargs)
    return [[token.id for token in row] for row in rows], compiled.decoder.compilations


def prompts_of(name: str) -> list[list[int]]:
    return [row["prompt"] for row in golden(name)["rows"]]


def tokens_of(name: str) -> list[list[int]]:
    return [row["tokens"] for row in golden(name)["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_goldens_are_on_both_sides_and_cross(name, loaded):
    """And the program that generates them is one over pools."""
    lengths = [len(prompt) for prompt in prompts_of(name)]
    assert lengths == [5, 20, 31, 33, 40]
    assert all(len(tokens) == 24 for tokens in tokens_of(name))
    decoder = Decoder(loaded(name).decoder, 1)
    assert decoder.signature.length_switches == LengthSwitches((SWITCH,))
    assert decoder.signature.uses_pools
    assert isinstance(decoder.begin_session([64]), LengthSwitchSession)
    assert decoder.max_positions == 128  # the rows of the long table: that of short rows ends none


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_step_size": 8},
        {"prompt_lookup_num_tokens": 4},
        {"prompt_lookup_num_tokens": 4, "prefill_step_size": 16},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_in_any_chunks_and_with_drafts(name, settings, loaded):
    model, prompts = loaded(name), prompts_of(name)
    assert run(model, prompts, **settings)[0] == tokens_of(name)
    for prompt, tokens in zip(prompts, tokens_of(name), strict=True):
        assert run(model, [prompt], **settings)[0] == [tokens]


def test_a_draft_model_is_truncated_back_over_the_switch(loaded):
    """Its drafts pass the switch before the row does; a wrong draft is taken back to the other side."""
    name = NAMES[0]
    model, other = loaded(name), loaded(NAMES[1])
    for assistant in (model, other):
        assert run(model, prompts_of(name), assistant_model=assistant)[0] == tokens_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_beams_are_those_of_transformers(name, loaded):
    beams = golden(name)["beams"]
    expected = [row["tokens"] for row in beams["rows"]]
    settings = {"num_beams": beams["num_beams"], "max_new_tokens": beams["max_new_tokens"]}
    assert run(loaded(name), prompts_of(name), **settings)[0] == expected
    for prompt, tokens in zip(prompts_of(name), expected, strict=True):
        assert run(loaded(name), [prompt], **settings)[0] == [tokens]


def test_sampled_rows_are_alone_in_a_batch_and_with_drafts(loaded):
    model, prompts, seeds = loaded(NAMES[0]), prompts_of(NAMES[0]), [3, 1, 4, 1, 5]
    sampled = {"do_sample": True, "top_k": 0}
    alone = [run(model, [p], seeds=[s], **sampled)[0][0] for p, s in zip(prompts, seeds, strict=True)]
    assert alone != tokens_of(NAMES[0])
    assert run(model, prompts, seeds=seeds, **sampled)[0] == alone
    assert run(model, prompts, seeds=seeds, **sampled, prompt_lookup_num_tokens=5)[0] == alone


@pytest.mark.parametrize("block", [1, 4])
def test_a_prompt_cache_shares_prefixes_of_one_side(block, loaded, tmp_path):
    """What a short text left is of no use to a long one, nor the other way round, also after it was saved."""
    name = NAMES[0]
    model = loaded(name)
    cache = PromptCache(model, block=block)
    prompts, tokens = prompts_of(name), tokens_of(name)
    long = prompts[4]
    run(model, [long], cache=cache, max_new_tokens=1)
    assert cache.find([*long, 5]) == len(long) // block * block
    short = long[:SWITCH]
    assert cache.find(short) == 0  # 32 tokens are on the short side
    assert cache.find([*short, 5]) == SWITCH // block * block
    run(model, [short], cache=cache, max_new_tokens=1)
    assert cache.find(short) == (SWITCH - 1) // block * block
    cache.save(tmp_path / "cache.safetensors")
    for used in (cache, PromptCache.load(tmp_path / "cache.safetensors", model)):
        assert used.find(short) == (SWITCH - 1) // block * block
        assert used.find([*short, 5]) == SWITCH // block * block
        for _ in range(2):
            assert run(model, prompts, cache=used)[0] == tokens
        assert run(model, [prompts[0]], cache=used)[0] == [tokens[0]]
        # Texts go on over the switch, as a chat does.
        chats = [prompt + row[:k] for k, (prompt, row) in enumerate(zip(prompts, tokens, strict=True), start=5)]
        rest = [row[k:] for k, row in enumerate(tokens, start=5)]
        assert [row[: 24 - k] for k, row in enumerate(run(model, chats, cache=used)[0], start=5)] == rest


def test_rows_that_share_a_stored_prefix_have_slots_of_their_own_after_the_switch(loaded):
    """A cache of no more slots than two rows need: the prefix that both share is there twice after the switch."""
    name = NAMES[0]
    model, prompt, tokens = loaded(name), prompts_of(name)[1], tokens_of(name)[1]
    cache = PromptCache(model, max_tokens=2 * 44)
    for _ in range(2):
        assert run(model, [prompt, prompt], cache=cache)[0] == [tokens, tokens]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["in_place", "grow"])
def test_the_graph_with_past_and_present_passes_its_switch_too(name, mode):
    rows = list(zip(prompts_of(name), tokens_of(name), strict=True))
    decoder = Decoder(unrewritten_module(name), 1, cache_mode=mode)
    for prompt, tokens in rows if mode == "in_place" else rows[1:4:2]:
        text = prompt + tokens[:-1]
        session = decoder.begin_session([len(text)])
        session.announce_prompts([len(prompt)], 16)
        logits, chunks = None, [text[i : min(i + 16, len(prompt))] for i in range(0, len(prompt), 16)]
        for chunk in [*chunks, *([token] for token in tokens[:-1])]:
            logits = session.step(np.array([chunk], np.int32), [len(chunk)])
            session.evaluate(logits)
        assert logits is not None
        assert int(ops.to_host(logits[0]).argmax()) == tokens[-1]
        assert_near(name, ops.to_host(logits[0]), text)


def test_any_history_of_rows_gives_the_logits_of_each_row_alone(loaded):
    """Steps of any counts, forks, truncations and drafts, over the switch in both directions, with rows on both sides."""
    name, rows = NAMES[0], 3
    decoder = Decoder(loaded(name).decoder, rows)
    draw = np.random.default_rng(1)
    for _ in range(4):
        session = decoder.begin_session([70] * rows, paged=True, block_size=int(draw.choice([1, 4])))
        assert isinstance(session, CacheSession)
        texts: list[list[int]] = [draw.integers(3, VOCAB, n).tolist() for n in (27, 36, 30)]
        counts = [len(text) for text in texts]
        tokens = np.zeros((rows, max(counts)), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        logits = session.step(tokens, counts)
        session.evaluate(logits)
        for action in draw.choice(["step", "step", "draft", "truncate", "fork"], 14).tolist():
            _ACTIONS[action](name, session, texts, draw)
        session.close()


def _step(name, session, texts, draw):
    counts = [int(draw.integers(0, 4)) if len(text) < 60 else 0 for text in texts]
    tokens = draw.integers(3, VOCAB, (len(texts), 4)).astype(np.int32)
    logits = session.step(tokens, counts)
    session.evaluate(logits)
    for row, count in enumerate(counts):
        texts[row] += tokens[row, :count].tolist()
        if count:
            assert_near(name, ops.to_host(logits[row]), texts[row])


def _draft(name, session, texts, draw):
    """A chain of up to four tokens, of which some are accepted."""
    limits = [min(3, limit, 60 - len(text)) for limit, text in zip(session.draft_limits(), texts, strict=True)]
    depths = np.array([[d if d <= limit else -1 for d in range(4)] for limit in limits], np.int32)
    tokens = draw.integers(3, VOCAB, depths.shape).astype(np.int32)
    logits = session.verify_draft(tokens, np.tile(np.tri(4, dtype=bool), (len(texts), 1, 1)), depths)
    session.evaluate(logits)
    paths = []
    for row, text in enumerate(texts):
        count = int((depths[row] >= 0).sum())
        for depth in range(count):
            assert_near(name, ops.to_host(logits[row, depth]), text + tokens[row, : depth + 1].tolist())
        paths.append(list(range(int(draw.integers(0, count + 1)))))
        text += tokens[row, : len(paths[-1])].tolist()
    session.accept(paths)


def _truncate(name, session, texts, draw):
    lengths = [max(1, len(text) - int(draw.integers(0, 9))) for text in texts]
    session.truncate(lengths)
    for text, length in zip(texts, lengths, strict=True):
        del text[length:]


def _fork(name, session, texts, draw):
    parents = draw.integers(0, len(texts), len(texts)).tolist()
    session.fork(parents)
    texts[:] = [list(texts[parent]) for parent in parents]


_ACTIONS = {"step": _step, "draft": _draft, "truncate": _truncate, "fork": _fork}


def test_steps_are_compiled_for_sizes_and_sides_not_for_lengths(loaded):
    """90 tokens after a prompt of 7: chunks, single tokens in contexts of a few sizes, and those of the other side."""
    model = loaded(NAMES[0])
    prompt = prompts_of(NAMES[0])[0]
    _, crossing = run(model, [prompt], max_new_tokens=90)
    _, first = run(model, [prompt], max_new_tokens=SWITCH - len(prompt))
    _, beyond = run(model, [prompts_of(NAMES[0])[3]], max_new_tokens=60)
    assert crossing <= first + beyond + 1  # one chunk of all tokens up to the switch
    assert crossing <= 8


def test_a_row_that_passes_the_switch_is_computed_once(loaded, monkeypatch):
    """Steps over 20 + 24 tokens: the prompt's chunks, one for each new token, and the chunk of 32."""
    name, sizes = NAMES[0], []
    inner = CacheSession._run_step

    def counted(self, tokens, new, positions, side=0):
        sizes.append((tokens.shape[1], side))
        return inner(self, tokens, new, positions, side)

    monkeypatch.setattr(CacheSession, "_run_step", counted)
    assert run(loaded(name), [prompts_of(name)[1]])[0] == [tokens_of(name)[1]]
    assert sizes == [(16, 0), (4, 0), *[(1, 0)] * 12, (32, 1), *[(1, 1)] * 11]
    sizes.clear()
    run(loaded(name), [prompts_of(name)[3]], max_new_tokens=2)
    assert sizes == [(32, 1), (1, 1), (1, 1)]  # a prompt that is announced is on its side from its first chunk on


def test_a_draft_over_the_switch_is_refused(loaded):
    decoder = Decoder(loaded(NAMES[0]).decoder, 2)
    session = decoder.begin_session([50, 50], paged=True)
    session.step(np.ones((2, 30), np.int32), [30, 28])
    assert session.draft_limits() == [1, 3]
    depths = np.array([[0, 1, 2], [0, 1, 2]], np.int32)
    with pytest.raises(DecoderError, match="before a length switch"):
        session.verify_draft(np.ones((2, 3), np.int32), np.tile(np.tri(3, dtype=bool), (2, 1, 1)), depths)


def test_sides():
    switches = LengthSwitches((4, 9))
    assert [switches.side(n) for n in (0, 4, 5, 9, 10, 99)] == [0, 0, 1, 1, 2, 2]
    assert switches.sides_of(np.array([4, 5, 10], np.int32)).tolist() == [0, 1, 2]
    assert [int(switches.total_length(side)) for side in range(switches.sides)] == [4, 9, 10]
    assert [switches.max_length(side) for side in range(3)] == [4, 9, None]
    assert [switches.next_switch(n) for n in (1, 4, 5)] == [4, 4, 9]
    assert not LengthSwitches()
    assert LengthSwitches().sides == 1


def test_a_cache_of_slots_has_prefixes_by_root():
    cache = KVCache([], 8, 2)
    manager = cache.block_manager
    sequence, _ = manager.open([1, 2, 3], root=1)
    manager.append(sequence, [1, 2, 3])
    manager.store_prefix(sequence, root=1)
    assert [manager.match_prefix([1, 2, 3], root) for root in (0, 1, 2)] == [0, 2, 0]
    assert [block.before for block in manager.stored_blocks()] == [-2]
