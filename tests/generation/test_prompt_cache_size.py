"""The size of a prompt cache: slots are given as rows grow, a full cache evicts and then says so, and its sizes are few."""

from __future__ import annotations

import numpy as np
import pytest
from test_prompt_cache import TOKENS, assert_same_results, compile_model

from mlx_transmuter import generation
from mlx_transmuter.cache import CacheFullError, KVCache
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.runtime.cache_session import CacheSession


@pytest.fixture(params=[False, True], ids=["waiting", "running ahead"])
def running_ahead(request, monkeypatch):
    """Sessions whose steps are submitted before the token before them is read, as on a GPU, and others."""
    begin = CacheSession.__init__

    def begin_session(session, *args, **more):
        begin(session, *args, **more)
        session.runs_ahead = request.param

    monkeypatch.setattr(CacheSession, "__init__", begin_session)


def streamed(steps) -> tuple[list[list[int]], Exception | None]:
    """Returns the tokens of each row that came, and the error that ended them."""
    tokens: list[list[int]] = []
    try:
        for step in steps:
            tokens = tokens or [[] for _ in step.token]
            for row, token in zip(tokens, step.token.tolist(), strict=True):
                row += [token] if token >= 0 else []
    except CacheFullError as error:
        return tokens, error
    return tokens, None


def after(count):
    """A stop condition that ends a row after `count` tokens."""
    return lambda tokens: len(tokens) >= count


@pytest.mark.parametrize("block", [1, 4])
def test_a_limited_cache_takes_what_fits_whatever_the_limit_of_new_tokens(block, loaded):
    """A prompt of 20 tokens and 5 new ones, of which no step takes the last, with the default limit of 256."""
    model = loaded("llama")
    gen = generation.compile(generation.context(model, eos_token_id=None, do_sample=False, token_logprobs=True), 1)
    expected = generation.generate(compile_model(model, max_new_tokens=5), [TOKENS[:20]], [0])
    steps = generation.generate_steps(
        gen, [TOKENS[:20]], [0], stop=[after(5)], prompt_cache=PromptCache(model, block=block, max_tokens=24)
    )
    assert_same_results([result.tokens for result in generation.run_to_end(steps)], expected)


@pytest.mark.usefixtures("running_ahead")
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True, "top_k": 0}], ids=str)
@pytest.mark.parametrize("block", [1, 4])
def test_a_full_cache_delivers_every_token_that_it_has_room_for_and_then_says_what_to_do(block, options, loaded):
    model, prompt = loaded("llama"), TOKENS[:20]
    gen = compile_model(model, max_new_tokens=30, **options)
    expected, _ = streamed(generation.generate_steps(gen, [prompt], [3]))
    cache = PromptCache(model, block=block, max_tokens=32)
    for _ in range(2):  # the second run begins with what the first has stored
        found, error = streamed(generation.generate_steps(gen, [prompt], [3], prompt_cache=cache))
        assert found == [expected[0][:13]]  # no step takes the last
        assert "at most 32" in str(error)
        assert "max_tokens" in str(error)
        assert not cache.kv_cache.in_use
        assert cache.find([*prompt, *expected[0][:12], 1]) == 32
    short = compile_model(model, max_new_tokens=8)
    for other in (prompt, [7, *TOKENS[:20]]):
        assert_same_results(
            generation.generate(short, [other], [0], prompt_cache=cache), generation.generate(short, [other], [0])
        )


@pytest.mark.usefixtures("running_ahead")
def test_stored_prefixes_that_no_row_uses_are_evicted_in_the_middle_of_a_text(loaded):
    model = loaded("llama")
    cache, gen = PromptCache(model, max_tokens=50), compile_model(model, max_new_tokens=25)
    for start in (0, 40):
        prompt = TOKENS[start : start + 25]
        found = generation.generate(gen, [prompt], [0], prompt_cache=cache)
        assert_same_results(found, generation.generate(gen, [prompt], [0]))
    assert cache.find(TOKENS[:26]) <= 1
    assert cache.find([*prompt, *(token.id for token in found[0]), 1]) == 49


@pytest.mark.usefixtures("running_ahead")
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_rows_that_have_ended_make_room_for_the_others(options, loaded):
    """30 slots for rows of 10 + 3 and of 10 + 14 tokens: too few for both, enough once the first has ended."""
    model, prompts = loaded("llama"), [TOKENS[:10], TOKENS[20:30], []]
    gen = compile_model(model, 3, max_new_tokens=15, **options)
    expected, _ = streamed(generation.generate_steps(gen, prompts, [0] * 3, stop=[after(4), None, None]))
    assert [len(row) for row in expected] == [4, 15, 0]
    cache = PromptCache(model, max_tokens=30)
    steps = generation.generate_steps(gen, prompts, [0] * 3, stop=[after(4), None, None], prompt_cache=cache)
    assert streamed(steps) == (expected, None)
    assert cache.find([*prompts[1], *expected[1]]) == 24
    assert cache.kv_cache.block_manager.free_slots == 30


@pytest.mark.parametrize("options", [{"num_beams": 4}, {"num_return_sequences": 4, "do_sample": True, "top_k": 0}])
def test_the_beams_and_sequences_of_a_prompt_need_its_slots_once(options, loaded):
    """A prompt of 40 tokens, and 5 new ones of each of 4 rows, of which no step takes the last."""
    model, prompt = loaded("llama"), TOKENS[:40]
    gen = compile_model(model, max_new_tokens=5, **options)
    cache = PromptCache(model, max_tokens=40 + 4 * 4)
    assert_same_results(
        generation.generate(gen, [prompt], [0], prompt_cache=cache), generation.generate(gen, [prompt], [0])
    )


def test_sixty_requests_of_one_length_compile_few_steps_and_copy_no_more_than_the_cache_holds(loaded, monkeypatch):
    """A request has four shapes: chunks of 64, 32 and 4 tokens, and a new token. The cache has two sizes. The prompts
    have no common prefix, which would leave tails of other lengths."""
    copied: list[int] = []
    grow = KVCache.grow
    monkeypatch.setattr(
        KVCache,
        "grow",
        lambda cache, slots: copied.append(cache.block_manager.num_slots) or grow(cache, slots),
    )
    model = loaded("llama")
    cache, gen = PromptCache(model), compile_model(model, max_new_tokens=8, token_logprobs=False)
    draw = np.random.default_rng(0)
    for first in range(60):
        generation.generate(gen, [[first, *draw.integers(3, 60, 99).tolist()]], [0], prompt_cache=cache)
    assert cache.tokens == 60 * (100 + 7)  # no step takes the last token
    assert gen.compilation_count <= 8
    assert sum(copied) <= cache.kv_cache.block_manager.num_slots / 2
