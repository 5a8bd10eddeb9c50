"""Helpers that run generation over the fake decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_decoder import FakeDecoder
from setting_strategies import VOCAB

from mlx_transmuter import generation


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
) -> Any:
    """Returns a CompiledGeneration over a new FakeDecoder.

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


def results_with_errors(gen: Any, prompts: list[list[int]], seeds: list[int]) -> list[generation.GenerationResult]:
    """Returns the results of a run to its end, also where an error says that the scores of some rows left no token."""
    try:
        return run_batch(gen, prompts, seeds)[1]
    except generation.ScoreError as error:
        return error.results


def generated_ids(
    batch: int, prompts: list[list[int]], seeds: list[int] | None = None, **options: Any
) -> list[list[int]]:
    """Returns the ids of each result."""
    _, results = run_batch(compile_fake(batch, **options), prompts, seeds)
    return [[token.id for token in result.tokens] for result in results]
