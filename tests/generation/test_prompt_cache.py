"""Prompts with a prompt cache: tokens and log-probabilities without one, and only the tails are computed."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from conftest import NAMES
from decoding import rows_of, tokens_of, unrewritten_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_transmuter import generation
from mlx_transmuter.cache import CacheError, kv_cache
from mlx_transmuter.cache.layout import slots_of_blocks
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.decoder import Decoder

NEW_TOKENS = 4
TOKENS = np.random.default_rng(7).integers(3, 60, 80).tolist()
OPTIONS = {"eos_token_id": None, "do_sample": False, "max_new_tokens": NEW_TOKENS, "token_logprobs": True}


def compile_model(model, rows: int = 1, decoder: Decoder | None = None, **options) -> generation.CompiledGeneration:
    return generation.compile(generation.context(model, **{**OPTIONS, **options}), rows, decoder=decoder)


@pytest.fixture
def computed_counts(monkeypatch):
    """The number of tokens of each row in each step."""
    counts: list[list[int]] = []
    step = CacheSession.step
    monkeypatch.setattr(
        CacheSession,
        "step",
        lambda session, tokens, new, *more: counts.append(list(new)) or step(session, tokens, new, *more),
    )
    return counts


def poison(cache: PromptCache) -> None:
    """Writes NaN into every row of the pools without a stored token: no step may read one."""
    kv_cache = cache.kv_cache
    stored_slots = slots_of_blocks(
        [block.number for block in kv_cache.block_manager.stored_blocks()], kv_cache.block_size
    )
    arrays = kv_cache.pools.take()
    for i, spec in enumerate(kv_cache.pool_specs):
        free = np.ones(arrays[i].shape[0], bool)
        free[kv_cache.pool_rows(stored_slots, spec.heads)] = False
        arrays[i] = mx.where(mx.array(free)[:, None], mx.array(np.nan, spec.dtype), arrays[i])
    kv_cache.pools.put(arrays)
    kv_cache.pools.evaluate()


def assert_same_results(found, expected) -> None:
    """Asserts equal tokens, and log-probabilities that differ only by the order of sums."""
    assert [[token.id for token in text] for text in found] == [[token.id for token in text] for text in expected]
    for text, other in zip(found, expected, strict=True):
        np.testing.assert_allclose([t.logprob for t in text], [t.logprob for t in other], rtol=0, atol=2e-4)


def block_border_lengths(block: int) -> list[int]:
    return sorted({n for edge in (block, 2 * block) for n in (edge - 1, edge, edge + 1) if n > 0})


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_second_prompt_computes_its_tail_alone(name, block, loaded, computed_counts):
    """Stored lengths and common prefixes around the borders of blocks, with NaN in every other row."""
    model = loaded(name)
    gen = compile_model(model)
    generate_uncached = functools.cache(lambda *prompt: generation.generate(gen, [prompt], [0]))
    for cached_length in block_border_lengths(block):
        for common in sorted({1, *block_border_lengths(block), cached_length} & set(range(1, cached_length + 1))):
            other = [*TOKENS[:common], 2, *TOKENS[40:43]]
            for prompt in (other, TOKENS[:common]):
                cache = PromptCache(model, block=block)
                generation.generate(gen, [TOKENS[:cached_length]], [0], prompt_cache=cache)
                poison(cache)
                computed_counts.clear()
                found = generation.generate(gen, [prompt], [0], prompt_cache=cache)
                stored = min(common, len(prompt) - 1) // block * block
                assert sum(sum(step) for step in computed_counts) == len(prompt) - stored + NEW_TOKENS - 1
                assert_same_results(found, generate_uncached(*prompt))


# A prompt cache stores keys and values that follow from tokens alone, which these do not have.
UNSUPPORTED_MODELS = {"deltanet_ort": "states", "lfm2": "states", "gpt2_reread": "without a cache"}


@pytest.mark.parametrize("name", UNSUPPORTED_MODELS)
def test_a_decoder_with_states_or_without_a_cache_is_refused(name, loaded):
    with pytest.raises(GenerationError, match=UNSUPPORTED_MODELS[name]):
        PromptCache(loaded(name))


@pytest.mark.parametrize("limits", [{"max_bytes": "1GB"}, {"max_tokens": 2.5}], ids=str)
def test_a_limit_that_is_no_number_is_refused(limits, loaded):
    with pytest.raises(GenerationError, match="a whole number"):
        PromptCache(loaded("llama"), **limits)


def test_a_value_that_is_no_prompt_cache_is_refused(loaded):
    gen = compile_model(loaded("llama"), 1, max_new_tokens=1)
    with pytest.raises(GenerationError, match=r"generation\.PromptCache"):
        generation.generate(gen, [[5]], [0], prompt_cache="cache.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSUPPORTED_MODELS])
def test_golden_prompts_with_an_empty_and_a_full_cache(name, loaded):
    """The golden tokens of each fixture, first with an empty cache and then with all prompts in it."""
    rows, model = rows_of(name), loaded(name)
    cache = PromptCache(model)
    gen = compile_model(model, len(rows), max_new_tokens=max(len(row["tokens"]) for row in rows))
    for _ in range(2):
        found = generation.generate(gen, [row["prompt"] for row in rows], [0] * len(rows), prompt_cache=cache)
        for text, expected in zip(found, tokens_of(rows), strict=True):
            assert [token.id for token in text][: len(expected)] == expected
        poison(cache)


MODES = [("llama", "append"), ("mistral", "append"), ("llama_genai", "in_place"), ("gemma", "grow"), ("llama", "grow")]


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_graph_without_pools_shares_prefixes_too(name, mode, block, computed_counts):
    """Rows of equal length with stored prefixes of several lengths: mode grow uses the shortest of them."""
    model = Model(unrewritten_module(name))
    gen = compile_model(model, 2, Decoder(model.decoder, 2, cache_mode=mode))
    cache = PromptCache(model, block=block)
    generation.generate(gen, [TOKENS[:9], TOKENS[20:24]], [0, 0], prompt_cache=cache)
    poison(cache)
    computed_counts.clear()
    prompts = [TOKENS[:12], [*TOKENS[20:24], *TOKENS[50:58]]]
    found = generation.generate(gen, prompts, [0, 0], prompt_cache=cache)
    stored = [9 // block * block, 4 // block * block]
    stored = [min(stored)] * 2 if mode == "grow" else stored
    assert sum(sum(step) for step in computed_counts) == sum(map(len, prompts)) - sum(stored) + 2 * (NEW_TOKENS - 1)
    assert_same_results(found, generation.generate(gen, prompts, [0, 0]))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.5, "top_k": 0},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "top_k": 0},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prefill_step_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [1, 3])
def test_ragged_batches_under_all_kinds_of_settings(options, block, loaded):
    """Padding rows, and rows that are stored wholly, in part and not at all."""
    model = loaded("llama")
    gen, one = compile_model(model, 4, **options), compile_model(model, 1, **options)
    cache = PromptCache(model, block=block)
    generation.generate(one, [TOKENS[:20]], [3], prompt_cache=cache)
    prompts = [TOKENS[:25], [], TOKENS[:20], [5, 6, 7]]
    for _ in range(2):
        poison(cache)
        found = generation.generate(gen, prompts, [1, 2, 3, 4], prompt_cache=cache)
        assert_same_results(found, generation.generate(gen, prompts, [1, 2, 3, 4]))


def test_rows_of_a_batch_share_one_copy(loaded):
    model = loaded("llama")
    cache = PromptCache(model)
    generation.generate(compile_model(model), [TOKENS[:40]], [0], prompt_cache=cache)
    stored_before = cache.tokens
    steps = generation.generate_steps(
        compile_model(model, 8), [[*TOKENS[:40], 3 + i] for i in range(8)], [0] * 8, prompt_cache=cache
    )
    next(steps)
    block_manager = cache.kv_cache.block_manager
    assert (
        block_manager.num_slots - (block_manager.free_slots - block_manager.evictable_slots) == stored_before + 8
    )  # of each row only its own last token
    steps.close()
    assert cache.tokens == stored_before + 8


@pytest.mark.parametrize("block", [1, 4])
def test_runs_never_change_stored_slots(block, loaded):
    """Every bit of every stored slot, after runs that continue inside, at the end of, and beside it."""
    model = loaded("llama")
    cache = PromptCache(model, block=block)
    gen = compile_model(model, 2)
    generation.generate(gen, [TOKENS[:21], TOKENS[:10]], [0, 0], prompt_cache=cache)
    kv_cache = cache.kv_cache
    stored_blocks = {block: (before, tokens) for before, tokens, block in kv_cache.block_manager.stored_blocks()}

    def bits() -> list[np.ndarray]:
        slots = np.array(sorted(stored_blocks))[:, None] * block + np.arange(block)
        return [
            np.array(mx.take(pool, mx.array(kv_cache.pool_rows(slots.reshape(-1), spec.heads)), axis=0))
            for pool, spec in zip(kv_cache.pools.arrays, kv_cache.pool_specs, strict=True)
        ]

    before = bits()
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
        gen = compile_model(model, 2, **options)
        for prompts in (
            [TOKENS[:21], TOKENS[:21]],
            [[*TOKENS[:7], 4, 4], TOKENS[:22]],
            [TOKENS[:11], [*TOKENS[:8], 9]],
        ):
            generation.generate(gen, prompts, [0, 1], prompt_cache=cache)
    assert all(np.array_equal(old, new) for old, new in zip(before, bits(), strict=True))


@pytest.mark.parametrize("block", [1, 4])
def test_the_pools_stay_within_the_limit_and_evict_the_least_recently_used(block, loaded):
    model = loaded("llama")
    gen = compile_model(model)
    slot_bytes = PromptCache(model).kv_cache.slot_nbytes
    for limit in ({"max_tokens": 36}, {"max_bytes": 36 * slot_bytes + slot_bytes // 2}):
        cache = PromptCache(model, block=block, **limit)
        assert cache.max_tokens == 36
        first, second, third = ([n, *TOKENS[n : n + 11]] for n in (3, 20, 37))
        for prompt in (first, second, first, third):
            found = generation.generate(gen, [prompt], [0], prompt_cache=cache)
            assert_same_results(found, generation.generate(gen, [prompt], [0]))
            assert cache.tokens <= cache.kv_cache.block_manager.num_slots <= 36
            assert cache.nbytes <= 36 * slot_bytes
            assert cache.find([*prompt, 1]) == 12 // block * block
        assert cache.find([*first, 1]) == 12 // block * block
        assert cache.find([*second, 1]) < 12 // block * block


def test_a_run_that_needs_more_than_the_limit_is_refused_and_the_cache_stays_usable(loaded):
    model = loaded("llama")
    gen = compile_model(model)
    cache = PromptCache(model, max_tokens=16)
    generation.generate(gen, [TOKENS[:8]], [0], prompt_cache=cache)
    with pytest.raises(CacheError, match="at most 16"):
        generation.generate(gen, [TOKENS[:20]], [0], prompt_cache=cache)
    assert cache.find(TOKENS) == 8
    assert_same_results(
        generation.generate(gen, [TOKENS[:9]], [0], prompt_cache=cache), generation.generate(gen, [TOKENS[:9]], [0])
    )


def test_a_closed_run_stores_what_it_computed(loaded):
    model = loaded("llama")
    cache = PromptCache(model)
    gen = compile_model(model, max_new_tokens=20)
    steps = generation.generate_steps(gen, [TOKENS[:8]], [0], prompt_cache=cache)
    text = [*TOKENS[:8], *(int(next(steps).token[0]) for _ in range(3))]
    steps.close()
    assert cache.find([*text, 1]) == 8 + 2  # no step took the third token
    assert_same_results(
        generation.generate(gen, [text], [0], prompt_cache=cache), generation.generate(gen, [text], [0])
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["_append_tokens", "evaluate", "compile_once", "put"])
def test_a_failed_run_leaves_nothing_half_written(error, where, loaded, monkeypatch):
    """Wherever an interrupt or a failure comes, later runs give the results of runs without a cache."""
    model = loaded("llama")
    cache, gen = PromptCache(model), compile_model(model)
    generation.generate(gen, [TOKENS[:8]], [0], prompt_cache=cache)
    owner = {"compile_once": Decoder, "put": type(cache.kv_cache.pools)}.get(where, CacheSession)
    calls, real = [0], getattr(owner, where)

    def failing(*args, **more):
        calls[0] += 1
        result = None if where == "put" and calls[0] == 3 else real(*args, **more)
        if calls[0] == 3:
            raise error
        return result

    monkeypatch.setattr(owner, where, failing)
    with pytest.raises(error):
        generation.generate(gen, [TOKENS[:20]], [0], prompt_cache=cache)
    monkeypatch.setattr(owner, where, real)
    assert not cache.kv_cache.in_use
    assert cache.kv_cache.block_manager.free_slots == cache.kv_cache.block_manager.num_slots
    for prompt in (TOKENS[:8], TOKENS[:20], TOKENS[:25]):
        assert_same_results(
            generation.generate(gen, [prompt], [0], prompt_cache=cache), generation.generate(gen, [prompt], [0])
        )


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_cache_that_could_not_grow_starts_empty(error, loaded, monkeypatch):
    monkeypatch.setattr(kv_cache, "FIRST_SLOTS", 16)
    gen, cache = compile_model(loaded("llama")), PromptCache(loaded("llama"))
    expected = generation.generate(gen, [TOKENS], [0])
    generation.generate(gen, [TOKENS[:5]], [0], prompt_cache=cache)
    assert cache.kv_cache.block_manager.num_slots == 16

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(mx, "concatenate", fail)
        with pytest.raises(error):
            generation.generate(gen, [TOKENS], [0], prompt_cache=cache)
    assert not cache.kv_cache.in_use
    assert_same_results(generation.generate(gen, [TOKENS], [0], prompt_cache=cache), expected)


def test_threads_take_turns(loaded):
    """One thread continues with the cache that another made, cleared or used; each has its own compiled functions."""
    model = loaded("llama")
    expected = generation.generate(compile_model(model), [TOKENS], [0])
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        cache = one.submit(PromptCache, model).result()
        for thread in (other, one, other):
            run = thread.submit(lambda: generation.generate(compile_model(model), [TOKENS], [0], prompt_cache=cache))
            assert_same_results(run.result(), expected)
        one.submit(cache.clear).result()
        assert_same_results(generation.generate(compile_model(model), [TOKENS], [0], prompt_cache=cache), expected)


@pytest.mark.parametrize(
    "option", [{"prefill_step_size": x} for x in (0, 2.5, "8")] + [{"kv_bits": x} for x in (8.0, "8")]
)
def test_sizes_are_whole_numbers(option, loaded):
    with pytest.raises(GenerationError, match=next(iter(option))):
        compile_model(loaded("llama"), **option)


def test_unsupported_uses_of_a_cache_are_refused(loaded):
    model = loaded("llama")
    gen, cache = compile_model(model), PromptCache(model)
    with pytest.raises(GenerationError, match="another model"):
        generation.generate(gen, [[5]], [0], prompt_cache=PromptCache(loaded("qwen2")))
    with pytest.raises(GenerationError, match="positions of their own"):
        generation.generate(gen, [[5, 6]], [0], {"position_ids": [[[0, 1]]]}, prompt_cache=cache)
    with pytest.raises(GenerationError, match="room for a block of 4"):
        PromptCache(model, max_tokens=3, block=4)
    steps = generation.generate_steps(gen, [[5, 6]], [0], prompt_cache=cache)
    next(steps)
    with pytest.raises(CacheError, match="one session at a time"):
        generation.generate(gen, [[5, 6]], [0], prompt_cache=cache)
    with pytest.raises(GenerationError, match="a generation that is not over"):
        cache.clear()
    assert next(steps).token[0] >= 0
    steps.close()
    cache.clear()
    assert (cache.tokens, cache.nbytes) == (0, 0)


def test_drafts_need_no_more_slots_than_their_number(loaded):
    """Two rows of 20 + 4 tokens with 3 draft tokens each."""
    model, prompts = loaded("llama"), [[5, 6, 7, 8] * 5, [9, 10] * 10]
    gen, speculative = compile_model(model, 2), compile_model(model, 2, prompt_lookup_num_tokens=3)
    cache = PromptCache(model, max_tokens=2 * (20 + NEW_TOKENS + 3))
    for _ in range(2):
        assert_same_results(
            generation.generate(speculative, prompts, [0] * 2, prompt_cache=cache),
            generation.generate(gen, prompts, [0] * 2),
        )


@pytest.mark.parametrize("block", [1, 4])
def test_where_drafts_find_no_room_the_tokens_alone_do(block, loaded):
    """No step takes the last token of a row."""
    model, prompts = loaded("llama"), [[5, 6, 7, 8] * 5, [9, 10] * 10]
    gen, speculative = compile_model(model, 2), compile_model(model, 2, prompt_lookup_num_tokens=3)
    cache = PromptCache(model, block=block, max_tokens=2 * (20 + NEW_TOKENS - (block == 1)))
    assert_same_results(
        generation.generate(speculative, prompts, [0] * 2, prompt_cache=cache),
        generation.generate(gen, prompts, [0] * 2),
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block=st.integers(2, 7),
    lengths=st.lists(st.integers(0, 30), min_size=2, max_size=2).filter(any),
    new=st.integers(1, 14),
    drafts=st.sampled_from([{"prompt_lookup_num_tokens": n, "max_matching_ngram_size": 1} for n in (1, 3, 40)] + [{}]),
    sampling=st.sampled_from([{}, {"do_sample": True, "num_return_sequences": 2, "temperature": 0.5}]),
)
def test_drafts_in_blocks_of_several_tokens_need_no_further_slot(block, lengths, new, drafts, sampling, loaded):
    """The results, the stored tokens, and that the pools need no more than the blocks of a row and of its drafts."""
    model = loaded("llama")
    options = {"max_new_tokens": new, **sampling}
    drafts = drafts or {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0, "assistant_model": model}
    prompts = [[5, 6, 7, 8] * 8][:1] * 2
    prompts = [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True)]
    max_draft_tokens = max(drafts.get("prompt_lookup_num_tokens", 0), drafts.get("num_assistant_tokens", 0))
    nodes = 1 + min(max_draft_tokens, 3 * max(0, new - 2))
    rows = [n for n in lengths if n for _ in range(options.get("num_return_sequences", 1))]
    room = sum(-(-(n + new - 1) // block) + -(-nodes // block) for n in rows) * block
    cache = PromptCache(model, block=block, max_tokens=room)
    gen, speculative = compile_model(model, 2, **options), compile_model(model, 2, **drafts, **options)
    expected = generation.generate(gen, prompts, [0, 1])
    for _ in range(2):
        assert_same_results(generation.generate(speculative, prompts, [0, 1], prompt_cache=cache), expected)
        block_manager = cache.kv_cache.block_manager
        assert block_manager.num_slots - block_manager.free_slots == 0  # nothing of the run remains but what is stored
        assert (block_manager.num_slots, block_manager.evictable_slots) == (room, cache.tokens)
        poison(cache)


@pytest.mark.parametrize("cached", [None, 1, 4])
def test_a_very_large_draft_limit_takes_no_more_slots_than_a_row_can_use(cached, loaded, monkeypatch):
    sessions = []
    begin = Decoder.begin_session
    monkeypatch.setattr(
        Decoder, "begin_session", lambda *args, **more: sessions.append(begin(*args, **more)) or sessions[-1]
    )
    model, prompt = loaded("llama"), [5, 6, 7, 8] * 5
    cache = None if cached is None else PromptCache(model, block=cached, max_tokens=64)
    speculative = compile_model(model, prompt_lookup_num_tokens=10**6, max_new_tokens=10)
    found = generation.generate(speculative, [prompt], [0], prompt_cache=cache)
    assert_same_results(found, generation.generate(compile_model(model, max_new_tokens=10), [prompt], [0]))
    assert sessions[0].block_manager.num_slots <= 64  # of a session of its own, too
    assert int(sessions[0].max_lengths.max()) <= 64


@pytest.mark.parametrize(("name", "found"), [("lfm2", "states"), ("gpt2_reread", "without a cache")])
def test_decoders_of_states_or_without_a_cache_have_no_prompt_cache(name, found, loaded):
    with pytest.raises(GenerationError, match=found):
        PromptCache(loaded(name))


def test_drafts_continue_after_a_stored_prefix(loaded):
    """Draft tokens that were accepted are stored as others are."""
    model, prompt = loaded("llama"), [5, 6, 7, 8] * 5
    cache, gen = PromptCache(model), compile_model(model)
    speculative = compile_model(model, prompt_lookup_num_tokens=3)
    for text in (prompt, [*prompt, 9], prompt):
        assert_same_results(
            generation.generate(speculative, [text], [0], prompt_cache=cache), generation.generate(gen, [text], [0])
        )
    assert cache.find([*prompt, 9, 1]) == len(prompt) + 1


CALLS = st.lists(
    st.lists(st.lists(st.integers(3, 4), max_size=7), min_size=2, max_size=2).filter(any), min_size=1, max_size=5
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS, block=st.sampled_from([1, 2, 3]), limit=st.sampled_from([None, 26]), beams=st.sampled_from([1, 2]))
def test_any_sequence_of_calls(calls, block, limit, beams, loaded):
    """Few ids, so that prompts share prefixes of all kinds, and a limit at which stored blocks are evicted."""
    model = loaded("llama")
    gen = cached_gen(model, beams)
    cache = PromptCache(model, block=block, max_tokens=limit and limit * beams)
    for prompts in calls:
        assert_same_results(
            generation.generate(gen, prompts, [0, 0], prompt_cache=cache), generation.generate(gen, prompts, [0, 0])
        )
        poison(cache)


COMPILED_GENERATIONS: dict[int, generation.CompiledGeneration] = {}


def cached_gen(model, beams: int) -> generation.CompiledGeneration:
    if beams not in COMPILED_GENERATIONS:
        COMPILED_GENERATIONS[beams] = compile_model(model, 2, num_beams=beams, max_new_tokens=3)
    return COMPILED_GENERATIONS[beams]
