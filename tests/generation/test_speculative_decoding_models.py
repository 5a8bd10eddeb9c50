"""Drafts on real decoders: windows, softcaps, learned positions, ALiBi, GroupQueryAttention, 4 bits, float16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import unrewritten_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from setting_strategies import MODEL_PROCESSOR_SETTINGS, MODEL_SAMPLING_SETTINGS

from mlx_transmuter import generation
from mlx_transmuter.generation import GenerationError
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.module import ProgramModule

pytestmark = pytest.mark.slow

ARCHITECTURES = [
    "llama",
    "mistral",
    "gemma2",
    "gpt2",
    "bloom",
    "phi3",
    "llama_genai",
    "mistral_genai",
    "llama_q4",
    "gpt_oss",
]
# Rows of their own lengths, one of padding; the second repeats itself, past the window of 8 that mistral has.
PROMPTS = [[70, 71, 72, 73, 70, 71, 72], [80, 81, 82, 83] * 4, [], [90]]
SEEDS = [3, 4, 5, 6]
LOGPROB = 2e-4  # the same sums in another order


class PoisonedDecoders:
    """One decoder of each model, whose steps stay compiled over the cases, and whose pools start full of large numbers: a slot
    that no token of a row was written to must not count."""

    decoders: dict[tuple[str, ...], Decoder] = {}  # noqa: RUF012 shared by all tests of the session

    @classmethod
    def of(cls, name: str, model: Any, role: str = "model") -> Decoder:
        if (name, role) not in cls.decoders:
            decoder = cls.decoders[name, role] = Decoder(model.decoder, len(PROMPTS))
            begin = decoder.begin_session
            decoder.begin_session = lambda *args, **more: _poison(begin(*args, **more))  # type: ignore[method-assign]
        return cls.decoders[name, role]


def _poison(session: Any) -> Any:
    session.pools.put([mx.full(pool.shape, 1e4, pool.dtype) for pool in session.pools.take()])
    return session


def generate(name: str, loaded: Any, assistant: str | None = None, **options: Any) -> list[generation.GenerationResult]:
    decoders = {"decoder": PoisonedDecoders.of(name, loaded(name))}
    if assistant is not None:
        options["assistant_model"] = replace(
            loaded(assistant), tokenizer=None
        )  # its tokens differ, its vocabulary has the same size
        decoders["assistant_decoder"] = PoisonedDecoders.of(assistant, loaded(assistant), "assistant")
    ctx = generation.context(loaded(name), token_logprobs=True, **{"do_sample": False, **options})
    steps = generation.generate_steps(generation.compile(ctx, len(PROMPTS), **decoders), PROMPTS, SEEDS)
    return generation.run_to_end(steps)


def assert_same_results(
    found: list[generation.GenerationResult], unrewritten_module: list[generation.GenerationResult]
) -> None:
    for one, other in zip(found, unrewritten_module, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert one.finish_reason == other.finish_reason
        far = [abs(a.logprob - b.logprob) for a, b in zip(one.tokens, other.tokens, strict=True)]
        assert max(far, default=0) <= LOGPROB


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.fixed_dictionaries({}, optional=MODEL_PROCESSOR_SETTINGS),
    sampling=st.none() | st.fixed_dictionaries({"do_sample": st.just(True)}, optional=MODEL_SAMPLING_SETTINGS),
    max_draft_tokens=st.sampled_from([2, 5]),
)
def test_results_are_those_of_plain_decoding(name, loaded, options, sampling, max_draft_tokens):
    options = {**options, **(sampling or {}), "max_new_tokens": 16}
    lookup = {"prompt_lookup_num_tokens": max_draft_tokens, "max_matching_ngram_size": 2}
    assert_same_results(generate(name, loaded, **lookup, **options), generate(name, loaded, **options))


@pytest.mark.parametrize(("name", "assistant"), [("llama", "mistral"), ("mistral", "llama_q4"), ("gemma2", "gemma2")])
@settings(max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.fixed_dictionaries({}, optional=MODEL_PROCESSOR_SETTINGS),
    sampling=st.none() | st.fixed_dictionaries({"do_sample": st.just(True)}, optional=MODEL_SAMPLING_SETTINGS),
    max_draft_tokens=st.sampled_from([2, 5]),
    threshold=st.sampled_from([0.0, 0.2]),
)
def test_results_with_an_assistant_are_those_of_plain_decoding(
    name, assistant, loaded, options, sampling, max_draft_tokens, threshold
):
    options = {**options, **(sampling or {}), "max_new_tokens": 16}
    drafting = {"num_assistant_tokens": max_draft_tokens, "assistant_confidence_threshold": threshold}
    assert_same_results(generate(name, loaded, assistant, **drafting, **options), generate(name, loaded, **options))


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gpt2"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.5}])
def test_all_drafts_of_a_model_that_drafts_for_itself_are_accepted(name, loaded, sampling):
    drafting = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    found = generate(name, loaded, name, max_new_tokens=20, eos_token_id=None, **drafting, **sampling)
    for result in found:
        if result.tokens:
            assert result.draft_counts == (4, 15, 15)  # 19 tokens after the first: three passes of 5 and one of 4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_some_drafts_are_accepted(name, loaded):
    """Biases make rows repeat themselves, so that long paths are accepted: past the windows too."""
    bias = [[[70 + place, 71 + place], 60.0] for place in range(20)] + [[[90, 70], 60.0]]
    options = {"max_new_tokens": 40, "sequence_bias": bias, "eos_token_id": None}
    unrewritten_module, found = (
        generate(name, loaded, **options),
        generate(name, loaded, prompt_lookup_num_tokens=5, **options),
    )
    assert_same_results(found, unrewritten_module)
    assert sum(result.draft_counts.accepted for result in found if result.draft_counts) > 20


def test_a_graph_without_pools_refuses_drafts(loaded):
    ctx = generation.context(replace(loaded("llama"), decoder=unrewritten_module("llama")), prompt_lookup_num_tokens=3)
    with pytest.raises(GenerationError, match="prompt_lookup_num_tokens"):
        generation.compile(ctx, 1)


def test_an_assistant_of_another_tokenizer_is_refused(loaded):
    with pytest.raises(GenerationError, match="assistant_model: found a tokenizer of which"):
        generation.context(loaded("llama"), assistant_model=loaded("mistral"))
    generation.context(loaded("llama"), assistant_model=loaded("llama_q4"))


@pytest.mark.usefixtures("compiling")
def test_prompts_of_different_lengths_share_compiled_steps(loaded, monkeypatch):
    ctx = generation.context(loaded("llama"), max_new_tokens=30, prompt_lookup_num_tokens=3, eos_token_id=None)
    gen = generation.compile(ctx, 1)
    traced = []
    call = ProgramModule.__call__
    monkeypatch.setattr(ProgramModule, "__call__", lambda self, **feed: traced.append(1) or call(self, **feed))
    counts = []
    for length in (7, 7, 3, 6, 5, 7):
        generation.generate(gen, [([70, 71, 72] * 3)[:length]], [0])
        counts.append(len(traced))
    # Prompts in chunks of 4, 2 and 1; passes of 1, 2 and 4 nodes.
    assert counts[0] == counts[-1] <= 3 + 3


@pytest.mark.usefixtures("compiling")
def test_speculative_decoding_uses_no_more_memory_and_compiles_few_shapes(loaded):
    model = loaded("llama")
    decoder = Decoder(model.decoder, 4)
    ctx = generation.context(model, max_new_tokens=120, prompt_lookup_num_tokens=7, eos_token_id=None)
    usage = []
    for _ in range(3):
        generation.generate(generation.compile(ctx, 4, decoder=decoder), PROMPTS, SEEDS)
        mx.clear_cache()
        usage.append((decoder.compilations, mx.get_active_memory()))
    # The prompts' chunks in one context, and passes of 1, 2, 4 and 8 nodes in at most three contexts.
    assert usage[0][0] == usage[2][0] <= 5 + 4 * 3
    assert usage[2][1] <= usage[1][1] + 2**16


def test_float16_differs_from_plain_decoding_only_at_ties(loaded):
    """Half precision rounds sums of another order differently: tokens may differ from plain decoding's where two of them are
    within rounding of each other, and nowhere else."""
    options = {"max_new_tokens": 20, "eos_token_id": None}
    unrewritten_module = generate("llama_fp16", loaded, **options)
    found = generate("llama_fp16", loaded, prompt_lookup_num_tokens=4, **options)
    for one, other in zip(found, unrewritten_module, strict=True):
        for a, b in zip(one.tokens, other.tokens, strict=True):
            assert abs(a.logprob - b.logprob) <= 0.02
            if a.id != b.id:
                break
    assert np.isfinite([token.logprob for result in found for token in result.tokens]).all()
