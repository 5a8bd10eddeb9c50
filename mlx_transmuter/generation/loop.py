"""The loop of generation: prompts in, a StepOutput after each token, and the results at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from mlx_transmuter.cache import CacheFullError
from mlx_transmuter.generation.batch import Batch, StepOutput
from mlx_transmuter.generation.beam_search import search_beams
from mlx_transmuter.generation.drafts.speculative_decoding import decode_speculatively
from mlx_transmuter.generation.exit_gate import exit_gate, run_inside
from mlx_transmuter.generation.generation_context import CompiledGeneration
from mlx_transmuter.generation.plain_decoding import decode_tokens
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.row import GenerationResult
from mlx_transmuter.generation.row_group import RowGroup
from mlx_transmuter.generation.stop_rules import StopCondition
from mlx_transmuter.runtime.wired_memory import release_buffers, wired_memory

GenerationSteps = Generator[StepOutput, None, list[GenerationResult]]


def generate_steps(
    gen: CompiledGeneration,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    inputs: Mapping[str, Any] | None = None,
    *,
    stop: Sequence[StopCondition | None] | None = None,
    cancel_event: threading.Event | None = None,
    prompt_cache: PromptCache | None = None,
) -> GenerationSteps:
    """Generates after each prompt; yields a StepOutput after each token of a group of prompts, and returns the results.

    prompts, seeds, inputs, prompt_cache: as for `generate`. With num_return_sequences n, prompt i has the results i × n
    to i × n + n - 1. stop: per prompt None, or a function of a row's new tokens that ends it; the last of them stays in
    the result. cancel_event, set from any thread, ends the generation after the current token, and so does closing the
    generator; either way the prompt cache gets what was computed. A beam search yields its steps when its results
    are known.

    Raises GenerationError at once for wrong prompts, seeds or inputs, or a prompt cache of another model;
    CacheFullError for prompts that a limited prompt cache has no room for, and after the last token that it has room
    for where a text goes on; ScoreError at the end for rows whose scores left no token to select, once the others are
    done.
    """
    batch = Batch(gen, prompts, seeds, inputs or {}, stop=stop, cancel_event=cancel_event, prompt_cache=prompt_cache)
    return run_inside(exit_gate, _generate_groups(batch))


def run_to_end(steps: GenerationSteps, on_step: Callable[[StepOutput], Any] | None = None) -> list[GenerationResult]:
    """Runs the remaining steps of `generate_steps`, calls on_step with each, and returns the results.

    An error of on_step, and Ctrl-C, close the steps: a traceback that refers to them keeps no run open.
    """
    with closing(steps):
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value
            if on_step is not None:
                on_step(step)


def _generate_groups(batch: Batch) -> GenerationSteps:
    settings = batch.settings
    lengths = [len(batch.prompts[settings.prompt_of(row)]) for row in range(batch.row_count)]
    with wired_memory():
        for rows in batch.compiled.decoder.group_rows(lengths):
            group = RowGroup(batch, sorted({settings.prompt_of(row) for row in rows}))
            try:
                yield from _generate_group(group)
                group.store_prefixes()
            except (GeneratorExit, CacheFullError):  # between two steps; after any other end slots may be half written
                if not exit_gate.is_closed:
                    group.store_prefixes()
                raise
            finally:
                group.session.close()
                release_buffers()
    batch.add_length_notices()
    batch.raise_faults()
    return batch.results


def _generate_group(group: RowGroup) -> Generator[StepOutput, None, None]:
    if group.batch.settings.num_beams > 1:
        return search_beams(group)
    return decode_speculatively(group) if group.batch.compiled.max_draft_tokens else decode_tokens(group)
