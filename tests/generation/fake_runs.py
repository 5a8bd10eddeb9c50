"""Short ways to run generation over the fake decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fake_decoder import FakeDecoder

from mlx_transmuter import generation

VOCAB = 16


def model(generation_config: dict | None = None, **config: Any) -> Any:
    """What a context reads of a model."""
    return SimpleNamespace(generation_config=generation_config or {}, config=config, decoder=None)


def compiled(
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
        options["assistant_model"] = model()
    ctx = generation.context(model(generation_config, **(config or {})), **options)
    decoder, other = (
        None if given is None else FakeDecoder(batch * ctx.settings.width, **{"vocab": VOCAB, **given})
        for given in (fake or {}, assistant)
    )
    return generation.compile(ctx, batch, decoder=decoder, assistant=other)


def results(
    gen: Any, prompts: list[list[int]], seeds: list[int] | None = None, inputs: dict | None = None, **more: Any
):
    """The steps and the results of a run to its end."""
    steps = generation.run(gen, prompts, seeds or [0] * len(prompts), inputs, **more)
    found = []
    while True:
        try:
            found.append(next(steps))
        except StopIteration as end:
            return found, end.value


def texts(batch: int, prompts: list[list[int]], seeds: list[int] | None = None, **options: Any) -> list[list[int]]:
    """The ids of each text."""
    _, found = results(compiled(batch, **options), prompts, seeds)
    return [[token.id for token in result.tokens] for result in found]
