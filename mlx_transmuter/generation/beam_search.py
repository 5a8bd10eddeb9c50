"""Beam search: the beams of each prompt are rows of the batch, which fork after each step."""

from __future__ import annotations

from collections.abc import Generator, Mapping

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch, RowFault, StepOutput
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.prompt_beams import BeamHypothesis, PromptBeams
from mlx_transmuter.generation.row import GenerationResult, tokens_with_logprobs
from mlx_transmuter.generation.row_group import RowGroup
from mlx_transmuter.generation.stop_rules import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP


def search_beams(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Runs the beam search of the prompts of a group, and yields its steps when the results are known."""
    batch, selection = group.batch, group.selection
    search = BeamSearch(group)
    logits = group.prefill()
    keys = row_random_keys(batch.seeds, 1) if batch.settings.do_sample else []
    state, fixed = group.initial_state(keys)
    while logits is not None and not batch.cancelled:
        scores, sequences = search.scores_and_sequences()
        arrays = fixed | group.host_inputs.arrays_for(sequences)
        selected_candidates, state = selection.select_candidates(logits, state, arrays, mx.array(scores))
        del logits
        group.session.evaluate(selected_candidates, *state.values())
        parents, tokens, counts = search.take_candidates(np.array(selected_candidates))
        if not any(counts):
            break
        group.fork(parents)
        state = selection.fork_state(state, mx.array(parents), mx.array(tokens))
        logits = group.step(tokens[:, None], counts)
    yield from _output_hypotheses(batch, search.hypotheses)


class BeamSearch:
    """The searches of the prompts of a group: hypotheses by prompt."""

    def __init__(self, group: RowGroup):
        batch = group.batch
        self.group, self.width = group, group.rows_per_prompt
        self.hypotheses = {
            prompt: PromptBeams(batch.settings, batch.new_token_limits[prompt], batch.stop_rules[prompt])
            for prompt in group.prompt_indices
        }

    def scores_and_sequences(self) -> tuple[np.ndarray, list[list[int] | None]]:
        """Returns the scores of the rows' beams, float32 [rows], and their sequences; None for rows that get no token.

        The sequences are empty where the host's part of the processors reads none.
        """
        scores = np.zeros(len(self.group.all_rows), np.float32)
        sequences: list[list[int] | None] = [None] * len(self.group.all_rows)
        for prompt, beams in self.hypotheses.items():
            if beams.is_done:
                continue
            for row, beam in enumerate(beams.running_beams, start=prompt * self.width):
                scores[row] = beam.score
                reads_tokens = bool(self.group.selection.host_names)
                sequences[row] = [*self.group.prompt_tokens(row), *beam.tokens] if reads_tokens else []
        return scores, sequences

    def take_candidates(self, selected_candidates: np.ndarray) -> tuple[list[int], np.ndarray, list[int]]:
        """Takes the candidates of a step, int32 [prompts, n], and returns for each row the row that it continues, its
        next token, int32, and whether it gets one, 1 or 0."""
        rows = len(self.group.all_rows)
        parents, tokens, counts = list(self.group.all_rows), np.zeros(rows, np.int32), [0] * rows
        for prompt, beams in self.hypotheses.items():
            if beams.is_done:
                continue
            candidates = self.group.selection.read_candidates(selected_candidates[prompt])
            beam_parents = beams.take_candidates(candidates)
            if beams.is_done:
                continue
            first = prompt * self.width
            parents[first : first + self.width] = [first + parent for parent in beam_parents]
            tokens[first : first + self.width] = [beam.tokens[-1] for beam in beams.running_beams]
            counts[first : first + self.width] = [1] * self.width
        return parents, tokens, counts


def _output_hypotheses(batch: Batch, searches: Mapping[int, PromptBeams]) -> Generator[StepOutput, None, None]:
    """Stores the results of beam searches, and yields their tokens as steps."""
    per_prompt = batch.settings.num_return_sequences
    batch.faults |= {
        prompt * per_prompt: RowFault(beams.fault, beams.generated_length)
        for prompt, beams in searches.items()
        if beams.fault is not None
    }
    results = {
        prompt * per_prompt + place: _to_result(hypothesis, beams)
        for prompt, beams in searches.items()
        for place, hypothesis in enumerate(beams.best_hypotheses())
    }
    for place in range(max([1, *(len(result.tokens) for result in results.values())])):
        for index, result in results.items():
            batch.results[index] = result
            batch.finished_flags[index] = place + 1 >= len(result.tokens)
        yield batch.make_step_output(
            {index: result.tokens[place] for index, result in results.items() if place < len(result.tokens)}
        )


def _to_result(hypothesis: BeamHypothesis, beams: PromptBeams) -> GenerationResult:
    tokens = tokens_with_logprobs(hypothesis.tokens, hypothesis.logprobs)
    if tokens and beams.stop_rules.is_eos(tokens[-1].id):
        tokens.pop()
    return GenerationResult(tokens, _finish_reason(hypothesis, beams), float(hypothesis.score))


def _finish_reason(hypothesis: BeamHypothesis, beams: PromptBeams) -> str:
    if beams.fault is not None:
        return FINISH_ERROR
    if hypothesis.ended_by_stop:
        return FINISH_STOP
    return FINISH_LENGTH if beams.is_done else FINISH_CANCELLED
