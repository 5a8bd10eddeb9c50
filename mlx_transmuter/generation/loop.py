"""The loop of generation: prompts in, a StepOutput after each token, and the results at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch, StepOutput
from mlx_transmuter.generation.beam_search import search_beams
from mlx_transmuter.generation.drafts.speculative_decoding import decode_speculatively
from mlx_transmuter.generation.generation_context import CompiledGeneration
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.row import GenerationResult, Row
from mlx_transmuter.generation.row_group import RowGroup
from mlx_transmuter.generation.stop_rules import StopCondition

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
    the result. cancel_event, set from any thread, ends the run after the current token, and so does closing the
    generator; either way the prompt cache gets what the run computed. A beam search yields its steps when its results
    are known.

    Raises GenerationError at once for wrong prompts, seeds or inputs, or a prompt cache of another model.
    """
    return _generate_groups(
        Batch(gen, prompts, seeds, inputs or {}, stop=stop, cancel_event=cancel_event, prompt_cache=prompt_cache)
    )


def run_to_end(steps: GenerationSteps, on_step: Callable[[StepOutput], Any] | None = None) -> list[GenerationResult]:
    """Runs the remaining steps of `generate_steps`, calls on_step with each, and returns the results."""
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
    for rows in batch.compiled.decoder.group_rows(lengths):
        group = RowGroup(batch, sorted({settings.prompt_of(row) for row in rows}))
        try:
            yield from _generate_group(group)
            group.store_prefixes()
        except GeneratorExit:  # a run closed between two steps; after any other end its slots may be half written
            group.store_prefixes()
            raise
        finally:
            group.session.close()
    return batch.results


def _generate_group(group: RowGroup) -> Generator[StepOutput, None, None]:
    if group.batch.settings.num_beams > 1:
        return search_beams(group)
    return decode_speculatively(group) if group.batch.compiled.max_draft_tokens else _decode_tokens(group)


def _decode_tokens(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Greedy choice and sampling: one token per row and step."""
    batch, unpack = group.batch, group.selection.unpack_token
    rows = group.make_rows()
    logits = group.prefill()
    keys = row_random_keys(batch.seeds, group.rows_per_prompt) if batch.settings.do_sample else []
    decoding = _TokenDecoding(group, rows, *group.initial_state(keys))
    packed = None if logits is None else decoding.select(logits)
    del logits
    while packed is not None:
        following = None
        if decoding.runs_ahead and any(counts := decoding.continuing_rows(unread=1)):
            following = decoding.select(group.step(packed[:, :1], counts))
        read = np.array(packed)
        yield batch.append_tokens(rows, {row: unpack(read[row]) for row in rows})
        if batch.cancelled or not any(counts := decoding.continuing_rows(unread=0)):
            break
        packed = decoding.select(group.step(read[:, :1], counts)) if following is None else following
    for index, row in rows.items():
        batch.results[index] = row.to_result()


@dataclass
class _TokenDecoding:
    """The rows of a group that get one token per step, with the state of their processors."""

    group: RowGroup
    rows: Mapping[int, Row]
    state: ProcessorState
    fixed: ProcessorState

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is submitted before the token before it is read: the selection needs nothing of the host."""
        return self.group.session.runs_ahead and not self.group.selection.host_names

    def select(self, logits: mx.array) -> mx.array:
        """Submits the selection of the rows' next tokens, and waits for it unless steps run ahead."""
        group = self.group
        sequences = [
            self.rows[row].sequence if row in self.rows and self.rows[row].is_live else None for row in group.all_rows
        ]
        arrays = self.fixed | group.host_inputs.arrays_for(sequences)
        packed, self.state = group.selection.select_tokens(logits, self.state, arrays)
        del logits
        group.session.evaluate(packed, *self.state.values(), wait=not self.runs_ahead)
        return packed

    def continuing_rows(self, unread: int) -> list[int]:
        """Returns 1 for each row that gets a token after `unread` more, else 0."""
        return [
            int(row in self.rows and self.rows[row].is_live and self.rows[row].remaining_tokens > unread)
            for row in self.group.all_rows
        ]
