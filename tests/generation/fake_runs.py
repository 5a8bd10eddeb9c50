"""Short ways to run generation over the fake decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_decoder import FakeDecoder
from hypothesis import strategies as st

from mlx_transmuter import generation

VOCAB = 16

# Settings of the processors to draw from: those that a decoder of one token at a time and one that guesses share.
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
    """What a context reads of a model."""
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
    """A context compiled over a new FakeDecoder; fake and assistant: options of the decoder, and of one that guesses."""
    if assistant is not None:
        options["assistant_model"] = fake_model()
    ctx = generation.context(fake_model(generation_config, **(config or {})), **options)
    decoder, other = (
        None if given is None else FakeDecoder(batch * ctx.settings.rows_per_prompt, **{"vocab": VOCAB, **given})
        for given in (fake or {}, assistant)
    )
    return generation.compile(ctx, batch, decoder=decoder, assistant_decoder=other)


def run_to_end(
    gen: Any, prompts: list[list[int]], seeds: list[int] | None = None, inputs: dict | None = None, **more: Any
):
    """The steps and the results of a run to its end."""
    steps = generation.generate_steps(gen, prompts, seeds or [0] * len(prompts), inputs, **more)
    found = []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value


def generated_ids(
    batch: int, prompts: list[list[int]], seeds: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """The ids of each text."""
    _, found = run_to_end(compile_fake(batch, **options), prompts, seeds)
    return [[token.id for token in result.tokens] for result in found]
