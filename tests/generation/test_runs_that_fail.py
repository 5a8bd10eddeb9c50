"""Runs that an error of the caller, Ctrl-C, or an error before their first step ends: their prompt cache is free again,
also while a traceback refers to the run."""

from __future__ import annotations

import numpy as np
import pytest
from test_prompt_cache import assert_same_results, compile_model

from mlx_transmuter import generation
from mlx_transmuter.generation import PromptCache, row_group
from mlx_transmuter.runtime import decoder
from mlx_transmuter.tasks import text
from mlx_transmuter.tokenizer.detokenizer_stream import DetokenizerStream

PROMPT = np.random.default_rng(7).integers(3, 60, 20).tolist()
KINDS = {
    "plain": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {"num_assistant_tokens": 3},
}


@pytest.fixture(params=KINDS)
def gen(request, loaded):
    options = dict(KINDS[request.param])
    if request.param == "assistant":
        options["assistant_model"] = loaded("llama")
    return compile_model(loaded("llama"), **options)


def assert_usable(cache: PromptCache, gen: generation.CompiledGeneration) -> None:
    manager = cache.kv_cache.block_manager
    assert not cache.kv_cache.in_use
    assert manager.free_slots == manager.num_slots
    expected = generation.generate(gen, [PROMPT], [0])
    assert_same_results(generation.generate(gen, [PROMPT], [0], prompt_cache=cache), expected)


@pytest.mark.parametrize("error", [RuntimeError, StopIteration, KeyboardInterrupt])
@pytest.mark.parametrize("step", [1, 3])
def test_an_error_of_the_callback_ends_the_run(error, step, gen, loaded):
    cache, calls = PromptCache(loaded("llama")), []

    def fail(output):
        calls.append(output)
        if len(calls) == step:
            raise error

    with pytest.raises(error) as raised:
        generation.generate(gen, [PROMPT], [0], on_token=fail, prompt_cache=cache)
    assert_usable(cache, gen)
    assert raised.tb is not None


@pytest.mark.parametrize(
    ("module", "name"), [(row_group, "HostProcessorInputs"), (decoder, "RowSlots"), (decoder, "CacheSession")]
)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_before_the_first_step_ends_the_run(error, module, name, gen, loaded, monkeypatch):
    cache = PromptCache(loaded("llama"))

    def fail(*_args, **_options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(error) as raised:
            generation.generate(gen, [PROMPT], [0], prompt_cache=cache)
    assert_usable(cache, gen)
    assert raised.tb is not None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_text_is_streamed_ends_the_run(error, loaded, monkeypatch):
    model = loaded("llama")
    cache = PromptCache(model)
    task = text.generation(model, prompt_cache=cache, max_new_tokens=4, eos_token_id=[])

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(DetokenizerStream, "push", fail)
        with pytest.raises(error) as raised:
            list(task.stream(PROMPT))
    assert raised.tb is not None
    assert_usable(cache, compile_model(model))
