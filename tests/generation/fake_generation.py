"""Helpers that run generation over the fake decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_decoder import FakeDecoder
from hypothesis import strategies as st

from mlx_transmuter import generation

VOCAB = 16

# Values of the processors' settings to draw from, for plain and for speculative decoding.
PROCESSOR_SETTINGS = {
    "repetition_penalty": st.sampled_from([0.5, 1.3]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "encoder_repetition_penalty": st.sampled_from([0.6, 2.0]),
    "bad_words_ids": st.just([[3], [4, 5], [6, 7, 8], [5, 5]]),
    "sequence_bias": st.just([[[9], 2.5], [[9, 9], -6.0], [[3, 4], 5.0]]),
    "min_length": st.integers(1, 9),
    "min_new_tokens": st.integers(1, 9),
    "forced_bos_token_id": st.just(7),
    "forced_eos_token_id": st.sampled_from([1, 9]),
    "begin_suppress_tokens": st.just([3, 5, 7, 9, 11]),
}


def fake_model(generation_config: dict | None = None, **config: Any) -> Any:
    """Returns what a context reads of a model."""
    return SimpleNamespace(generation_config=generation_config or {}, config=config, decoder=None)


def compile_fake(
    batch: int,
    *,
    fake: dict | None = None,
    assistant: dict | None = None,
    generation_config: dict | None = None,
    config: dict | None = None,
    **options: Any,
):
    """Returns a context compiled over a new FakeDecoder.

    fake, assistant: options of the decoder, and of the one of an assistant model.
    """
    if assistant is not None:
        options["assistant_model"] = fake_model()
    ctx = generation.context(fake_model(generation_config, **(config or {})), **options)
    rows = batch * ctx.settings.rows_per_prompt
    decoder = FakeDecoder(rows, **{"vocab": VOCAB, **(fake or {})})
    assistant_decoder = None if assistant is None else FakeDecoder(rows, **{"vocab": VOCAB, **assistant})
    return generation.compile(ctx, batch, decoder=decoder, assistant_decoder=assistant_decoder)


def run_batch(
    gen: Any, prompts: list[list[int]], seeds: list[int] | None = None, inputs: dict | None = None, **more: Any
) -> tuple[list[generation.StepOutput], list[generation.GenerationResult]]:
    """Returns the steps and the results of a run to its end."""
    steps: list[generation.StepOutput] = []
    running = generation.generate_steps(gen, prompts, seeds or [0] * len(prompts), inputs, **more)
    results = generation.run_to_end(running, steps.append)
    return steps, results


def generated_ids(
    batch: int, prompts: list[list[int]], seeds: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """Returns the ids of each result."""
    _, results = run_batch(compile_fake(batch, **options), prompts, seeds)
    return [[token.id for token in result.tokens] for result in results]
