"""What a long run of a real decoder holds: nothing that grows with the tokens, and running ahead that changes no
token."""

from __future__ import annotations

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


# From token 260 to 500 the context that a step attends over keeps its size. Of the peaks of stretches of 20 tokens the
# least of each half is compared: now and then MLX lets a buffer go late. Logits that stayed would be 3,072 bytes per
# token.
STRETCHES = range(270, 500, 20)
SLACK = 2**15


class Watch:
    """What MLX held at its peaks and between steps, in stretches of tokens."""

    def __init__(self):
        self.peaks: dict[int, int] = {}
        self.held: list[int] = []

    def token(self, count: int) -> None:
        if count in STRETCHES and count not in self.peaks:
            self.peaks[count] = mx.get_peak_memory()
            self.held.append(mx.get_active_memory())
            mx.reset_peak_memory()

    def check_flat(self) -> None:
        peaks, held = list(self.peaks.values())[1:], self.held[1:]
        assert len(peaks) == len(STRETCHES) - 1
        for values in (peaks, held):
            before, after = min(values[:5]), min(values[5:])
            assert after <= before + SLACK, f"{after - before} bytes more"


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2, "token_logprobs": True}, {"do_sample": True}])
def test_the_peak_of_a_long_text_is_flat(loaded, options):
    gen = compiled(loaded("llama"), max_new_tokens=500, **{"do_sample": False, **options})
    watch = Watch()
    for token, _ in enumerate(generation.run(gen, PROMPTS, [0, 0]), start=1):
        watch.token(token)
    watch.check_flat()


@pytest.mark.usefixtures("compiling")
def test_the_peak_of_a_long_beam_search_is_flat(loaded):
    watch = Watch()

    def state(row):
        # Called for each beam before each token, for a search tells its steps at its end.
        watch.token(len(row["generated"]))
        return 0.0

    options = {"num_beams": 2, "do_sample": False, "processors": [(state, lambda logits, _: logits)]}
    generation.generate(compiled(loaded("llama"), max_new_tokens=500, **options), PROMPTS, [0, 0])
    watch.check_flat()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 2.0}, {"repetition_penalty": 1.5}])
def test_running_ahead_changes_no_token(loaded, options):
    model = loaded("llama")
    options = {"max_new_tokens": 12, "token_logprobs": True, "do_sample": False, **options}
    behind, ahead = compiled(model, **options), compiled(model, ahead=True, **options)
    assert generation.generate(behind, PROMPTS, [1, 2]) == generation.generate(ahead, PROMPTS, [1, 2])
