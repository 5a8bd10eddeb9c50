"""The memory of a long run of a real decoder, which does not grow with the tokens, and running ahead, which changes no
token."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_transmuter import generation
from mlx_transmuter.runtime.buckets import context_bucket
from mlx_transmuter.runtime.decoder import Decoder

PROMPTS = [[5, 6, 7], [8]]


def compile_model(model, ahead: bool = False, **options) -> generation.CompiledGeneration:
    ctx = generation.context(model, eos_token_id=None, **options)
    decoder = Decoder(model.decoder, 2 * ctx.settings.rows_per_prompt)
    begin = decoder.begin_session

    def begin_running_ahead(*args, **more):
        session = begin(*args, **more)
        session.runs_ahead = ahead
        return session

    decoder.begin_session = begin_running_ahead  # type: ignore[method-assign]
    return generation.compile(ctx, 2, decoder=decoder)


# Measured every 10 tokens. Memory between steps may not grow: leaked logits would be 3,072 bytes per token. The
# peaks are compared over the last tokens, where the context that a step attends over keeps its size; how many of a
# step's buffers are alive at once differs from step to step by a few of 2**18 bytes, as MLX runs them.
WATCHED_COUNTS = range(270, 500, 10)
PEAKS_AFTER = 450
SLACK, PEAK_SLACK = 2**15, 2**20
assert context_bucket(len(PROMPTS[0]) + PEAKS_AFTER) == context_bucket(len(PROMPTS[0]) + WATCHED_COUNTS.stop)


class MemoryWatch:
    """MLX's active and peak memory between steps, by the number of tokens."""

    def __init__(self):
        self.held: dict[int, int] = {}
        self.peaks: dict[int, int] = {}

    def token(self, count: int) -> None:
        if count in WATCHED_COUNTS and count not in self.held:
            self.held[count], self.peaks[count] = mx.get_active_memory(), mx.get_peak_memory()
            mx.reset_peak_memory()

    def check_no_growth(self) -> None:
        assert list(self.held) == list(WATCHED_COUNTS)
        active, peaks = list(self.held.values()), [peak for count, peak in self.peaks.items() if count > PEAKS_AFTER]
        assert min(active[-5:]) <= min(active[:5]) + SLACK
        assert min(peaks[-2:]) <= min(peaks[:2]) + PEAK_SLACK


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2, "token_logprobs": True}, {"do_sample": True}])
def test_peak_memory_does_not_grow_with_new_tokens(loaded, options):
    gen = compile_model(loaded("llama"), max_new_tokens=500, **{"do_sample": False, **options})
    watch = MemoryWatch()
    for token, _ in enumerate(generation.generate_steps(gen, PROMPTS, [0, 0]), start=1):
        watch.token(token)
    watch.check_no_growth()


@pytest.mark.usefixtures("compiling")
def test_peak_memory_does_not_grow_with_new_tokens_of_a_beam_search(loaded):
    watch = MemoryWatch()

    def state(row):
        # Called for each beam before each token: a search yields its steps at its end.
        watch.token(len(row["generated"]))
        return 0.0

    options = {"num_beams": 2, "do_sample": False, "processors": [(state, lambda logits, _: logits)]}
    generation.generate(compile_model(loaded("llama"), max_new_tokens=500, **options), PROMPTS, [0, 0])
    watch.check_no_growth()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 2.0}, {"repetition_penalty": 1.5}])
def test_running_ahead_changes_no_token(loaded, options):
    model = loaded("llama")
    options = {"max_new_tokens": 12, "token_logprobs": True, "do_sample": False, **options}
    behind, ahead = compile_model(model, **options), compile_model(model, ahead=True, **options)
    assert generation.generate(behind, PROMPTS, [1, 2]) == generation.generate(ahead, PROMPTS, [1, 2])
