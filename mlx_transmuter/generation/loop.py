"""The loop of generation: prompts in, a Step after each token out, and the texts at the end."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch, StepOutput, StopCondition
from mlx_transmuter.generation.beam_hypotheses import BeamHypotheses
from mlx_transmuter.generation.drafts.speculative_decoding import decode_speculatively
from mlx_transmuter.generation.generation_context import CompiledGeneration
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.prompt_cache import PromptCache
from mlx_transmuter.generation.row import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_STOP,
    GenerationResult,
    tokens_with_logprobs,
)
from mlx_transmuter.generation.row_group import RowGroup


def generate_steps(
    gen: CompiledGeneration,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    inputs: Mapping[str, Any] | None = None,
    *,
    stop: Sequence[StopCondition | None] | None = None,
    cancel_event: threading.Event | None = None,
    prompt_cache: PromptCache | None = None,
) -> Generator[StepOutput, None, list[GenerationResult]]:
    """Generates after each prompt; yields a Step after each token of a group of prompts, and returns the Results.

    prompts, seeds, inputs: as for `generate`. With num_return_sequences n, prompt i has the texts i × n to i × n + n -
    1. stop: per prompt None, or a function of a text's new tokens that ends it as an eos does; the token that ends it
    stays. cancel, set from any thread, ends the run after the token at hand, and so does closing the generator. A beam
    search yields its steps when its texts are known. prompt_cache: what it has of a prompt isn't computed again, and at
    the end it has the prompts and texts of this run, also of one that was ended early.

    Raises GenerationError at once for wrong prompts, seeds or inputs, or a prompt cache of another model.
    """
    return _generate_groups(Batch(gen, prompts, seeds, inputs or {}, stop, cancel_event, prompt_cache))


def _generate_groups(batch: Batch) -> Generator[StepOutput, None, list[GenerationResult]]:
    width = batch.settings.rows_per_prompt
    lengths = [len(prompt) for prompt in batch.prompts for _ in range(width)]
    for rows in batch.compiled.decoder.group_rows(lengths):
        group = RowGroup(batch, sorted({row // width for row in rows}))
        try:
            if batch.settings.num_beams > 1:
                yield from _search_beams(group)
            else:
                yield from decode_speculatively(group) if batch.compiled.max_draft_tokens else _decode_tokens(group)
            group.store_prefixes()
        except GeneratorExit:  # a run given up between two steps; after any other end its slots may be half written
            group.store_prefixes()
            raise
        finally:
            group.session.close()
    return batch.results


def _decode_tokens(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Greedy choice and sampling: one token per row and step."""
    batch, selection = group.batch, group.selection
    rows = group.make_rows()
    logits = group.prefill()
    state, fixed = group.initial_state(
        row_random_keys(batch.seeds, group.rows_per_prompt) if batch.settings.do_sample else []
    )
    # Without a part of the host in the choice, a step can be on its way before the token before it is read.
    ahead = group.session.runs_ahead and not selection.host_names

    def submit(logits: mx.array) -> mx.array:
        nonlocal state
        texts = [rows[row].sequence if row in rows and rows[row].is_live else None for row in group.all_rows]
        packed, state = selection.select_tokens(logits, state, fixed | group.host_inputs.arrays_for(texts))
        group.session.evaluate(packed, *state.values(), wait=not ahead)
        return packed

    def going(unread: int) -> list[int]:
        """1 for each row that goes on after unread more tokens."""
        return [
            int(row in rows and rows[row].is_live and rows[row].remaining_tokens > unread) for row in group.all_rows
        ]

    packed = None if logits is None else submit(logits)
    del logits
    while packed is not None:
        following = None
        if ahead and any(counts := going(unread=1)):
            following = submit(group.step(packed[:, :1], counts))
        read = np.array(packed)
        logprobs = read[:, 1].view(np.float32).tolist() if batch.context.token_logprobs else [None] * len(read)
        yield batch.append_tokens(rows, {row: (int(read[row, 0]), logprobs[row]) for row in rows})
        if batch.cancelled or not any(counts := going(unread=0)):
            break
        packed = following if following is not None else submit(group.step(read[:, :1], counts))
    for row, text in rows.items():
        batch.results[row] = text.to_result()


def _search_beams(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Beam search: the beams of each prompt are its rows, and fork after each step."""
    batch, selection, width = group.batch, group.selection, group.rows_per_prompt
    searches = {
        prompt: BeamHypotheses(batch.settings, batch.new_token_limits[prompt], batch.stop_conditions[prompt])
        for prompt in group.prompt_indices
    }
    logits = group.prefill()
    state, fixed = group.initial_state(row_random_keys(batch.seeds, 1) if batch.settings.do_sample else [])
    while logits is not None and not batch.cancelled:
        live = [prompt for prompt, beams in searches.items() if not beams.is_done]
        scores = np.zeros(len(group.all_rows), np.float32)
        texts: list[list[int] | None] = [None] * len(group.all_rows)
        for row in (row for row in group.member_rows if row // width in live):
            beam = searches[row // width].running_beams[row % width]
            scores[row] = beam.score
            texts[row] = [*batch.prompts[row // width], *beam.tokens] if selection.host_names else []
        given = fixed | group.host_inputs.arrays_for(texts)
        packed, state = selection.select_candidates(logits, state, given, mx.array(scores))
        del logits
        group.session.evaluate(packed, *state.values())
        read = np.array(packed)
        parents, tokens, counts = (
            list(group.all_rows),
            np.zeros(len(group.all_rows), np.int32),
            [0] * len(group.all_rows),
        )
        for prompt in live:
            beams, first = searches[prompt], prompt * width
            chosen = beams.take_candidates(*selection.unpack_candidates(read[prompt]))
            if not beams.is_done:
                parents[first : first + width] = [first + parent for parent in chosen]
                tokens[first : first + width] = [beam.tokens[-1] for beam in beams.running_beams]
                counts[first : first + width] = [1] * width
        if not any(counts):
            break
        group.fork(parents)
        state = selection.fork_state(state, mx.array(parents), mx.array(tokens))
        logits = group.step(tokens[:, None], counts)
    yield from _output_hypotheses(batch, searches)


def _output_hypotheses(batch: Batch, searches: Mapping[int, BeamHypotheses]) -> Generator[StepOutput, None, None]:
    """The Results of beam searches, and their tokens as Steps."""
    each = batch.settings.num_return_sequences
    told: dict[int, GenerationResult] = {}
    for prompt, beams in searches.items():
        for place, text in enumerate(beams.best_hypotheses()):
            tokens = tokens_with_logprobs(text.tokens, text.logprobs)
            if tokens and tokens[-1].id in batch.settings.eos_token_id:
                tokens.pop()
            reason = FINISH_STOP if text.ended_by_stop else FINISH_LENGTH if beams.is_done else FINISH_CANCELLED
            told[prompt * each + place] = GenerationResult(tokens, reason, float(text.score))
    for place in range(max([1, *(len(result.tokens) for result in told.values())])):
        for text, result in told.items():
            batch.results[text] = result
            batch.finished_flags[text] = place + 1 >= len(result.tokens)
        yield batch.make_step_output(
            {text: result.tokens[place] for text, result in told.items() if place < len(result.tokens)}
        )
