"""What a long run of a real decoder holds: nothing that grows with the tokens, and running ahead that changes no
token."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from mlx_transmuter import generation
from mlx_transmuter.decoder import Decoder

PROMPTS = [[5, 6, 7], [8]]


def compiled(model, ahead: bool = False, **options) -> generation.Compiled:
    ctx = generation.context(model, eos_token_id=None, **options)
    decoder = Decoder(model.decoder, 2 * ctx.settings.width, max_positions=1024)
    begin = decoder.begin

    def begun(*args, **more):
        run = begin(*args, **more)
        run.runs_ahead = ahead
        return run

    decoder.begin = begun  # type: ignore[method-assign]
    return generation.compile(ctx, 2, decoder=decoder)


def peaks(steps, stops: list[int]) -> list[int]:
    """The most bytes that MLX held in each stretch of tokens between stops."""
    found, at = [], 0
    for stop in stops:
        gc.collect()
        mx.reset_peak_memory()
        for _ in range(stop - at):
            next(steps)
        at = stop
        found.append(mx.get_peak_memory())
    return found


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2, "token_logprobs": True}, {"do_sample": True}])
def test_the_peak_of_a_long_text_is_flat(loaded, options):
    gen = compiled(loaded("llama"), max_new_tokens=500, **{"do_sample": False, **options})
    # From token 260 to 500 the context that a step attends over keeps its size.
    *_, before, after = peaks(generation.run(gen, PROMPTS, [0, 0]), [270, 380, 490])
    assert after <= before + 4096, f"{after - before} bytes more"


@pytest.mark.usefixtures("compiling")
def test_the_peak_of_a_long_beam_search_is_flat(loaded):
    held: list[int] = []

    def state(row):
        # Called for each beam before each token: beams tell their steps at the end only.
        if len(row["generated"]) in (270, 380, 490):
            held.append(mx.get_peak_memory())
            mx.reset_peak_memory()
        return 0.0

    gen = compiled(
        loaded("llama"),
        max_new_tokens=495,
        num_beams=2,
        do_sample=False,
        processors=[(state, lambda logits, _: logits)],
    )
    generation.generate(gen, PROMPTS, [0, 0])
    before, after = max(held[4:8]), max(held[8:12])
    assert after <= before + 65536, f"{after - before} bytes more"


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 2.0}, {"repetition_penalty": 1.5}])
def test_running_ahead_changes_no_token(loaded, options):
    model = loaded("llama")
    options = {"max_new_tokens": 12, "token_logprobs": True, "do_sample": False, **options}
    behind, ahead = compiled(model, **options), compiled(model, ahead=True, **options)
    assert generation.generate(behind, PROMPTS, [1, 2]) == generation.generate(ahead, PROMPTS, [1, 2])
