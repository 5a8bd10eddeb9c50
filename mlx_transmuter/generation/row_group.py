"""The prompts of a batch that share one session of the decoder: their steps, drafts and forks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import CacheFullError
from mlx_transmuter.generation.batch import Batch
from mlx_transmuter.generation.drafts.draft_tree import DraftArrays, slots_with_drafts
from mlx_transmuter.generation.logits.host_processor_inputs import HostProcessorInputs
from mlx_transmuter.generation.logits.processor_state import ProcessorInputs, ProcessorState
from mlx_transmuter.generation.prefill import max_chunk_tokens, prefill_in_chunks, prefill_packed
from mlx_transmuter.generation.prompt_positions import clip_to_positions
from mlx_transmuter.generation.row import Row
from mlx_transmuter.runtime.prefill_schedule import PackedPrefillRow, plan_packed_prefill
from mlx_transmuter.runtime.session import Session
from mlx_transmuter.runtime.wired_memory import release_buffers


class RowGroup:
    """A session of the decoder for the prompts `prompt_indices`; the rows of the batch's other prompts are padding.

    Prompt i has the rows i × rows_per_prompt to i × rows_per_prompt + rows_per_prompt - 1: its beams, or its sampled
    sequences.
    """

    def __init__(self, batch: Batch, prompt_indices: Sequence[int]):
        self.batch, self.prompt_indices, self.rows_per_prompt = batch, prompt_indices, batch.settings.rows_per_prompt
        self.selection = batch.compiled.selection
        self.all_rows = range(batch.row_count)
        self.member_rows = [row for row in self.all_rows if self.prompt_of(row) in prompt_indices]
        self.lengths = [0] * len(self.all_rows)
        self.max_lengths = [self._max_length(row) if row in self.member_rows else 0 for row in self.all_rows]
        self._rows: dict[int, Row] = {}
        self.host_inputs = HostProcessorInputs(self.selection, batch.prompts, batch.encoder_input_ids)
        # The last that can fail: the caller closes the session.
        self.session = self._begin_session()
        if batch.prompt_cache is not None:
            self.lengths = self.session.lengths.tolist()

    def prompt_of(self, row: int) -> int:
        """Returns the index of the prompt that a row continues."""
        return self.batch.settings.prompt_of(row)

    def prompt_tokens(self, row: int) -> list[int]:
        """Returns the tokens of the prompt that a row continues."""
        return self.batch.prompts[self.prompt_of(row)]

    def _max_length(self, row: int) -> int:
        """Returns the most tokens that a row needs slots for, with its drafts."""
        batch, new_tokens = self.batch, self.batch.new_token_limits[self.prompt_of(row)]
        size = clip_to_positions(len(self.prompt_tokens(row)) + new_tokens, batch.compiled.decoder.max_positions)
        if not batch.compiled.max_draft_tokens:
            return size
        block_size = 1 if batch.prompt_cache is None else batch.prompt_cache.kv_cache.block_size
        return slots_with_drafts(size, new_tokens, batch.compiled.max_draft_tokens, block_size)

    def _begin_session(self) -> Session:
        batch, decoder = self.batch, self.batch.compiled.decoder
        extra_inputs = batch.extra_inputs
        if self.rows_per_prompt > 1:
            extra_inputs = {
                name: mx.repeat(array, self.rows_per_prompt, axis=0) for name, array in extra_inputs.items()
            }
        first_rows = {prompt * self.rows_per_prompt for prompt in self.prompt_indices}
        if batch.prompt_cache is None:
            if self.rows_per_prompt == 1:
                return decoder.begin_session(self.max_lengths, extra_inputs, paged=batch.compiled.max_draft_tokens > 0)
            forked_lengths = [
                len(self.prompt_tokens(row)) if row in self.member_rows and row not in first_rows else 0
                for row in self.all_rows
            ]
            return decoder.begin_session(self.max_lengths, extra_inputs, paged=True, forked_lengths=forked_lengths)
        prompts = [self.prompt_tokens(row) if row in first_rows else [] for row in self.all_rows]
        return decoder.begin_session(
            self.max_lengths, extra_inputs, kv_cache=batch.prompt_cache.kv_cache, prompts=prompts
        )

    def prefill(self) -> mx.array | None:
        """Returns the logits after the prompts, [rows, vocab]; None if the batch was cancelled.

        A prompt runs in the first of its rows alone, without what a prompt cache has of it; the others then fork from
        it.
        """
        first_rows = [prompt * self.rows_per_prompt for prompt in self.prompt_indices]
        prompts = {row: self.prompt_tokens(row)[self.lengths[row] :] for row in first_rows}
        if packed_rows := self._plan_packed_prefill(prompts):
            last = prefill_packed(self.session, prompts, packed_rows, self.batch)
            self.lengths = [len(prompts.get(row, ())) for row in self.all_rows]
        else:
            last = prefill_in_chunks(self.session, self.step, prompts, self.batch)
        release_buffers()
        if last is None or self.rows_per_prompt == 1:
            return last
        parents = [self.prompt_of(row) * self.rows_per_prompt for row in self.all_rows]
        self.fork(parents)
        return last[mx.array(parents)]

    def _plan_packed_prefill(self, prompts: dict[int, list[int]]) -> list[PackedPrefillRow]:
        """Returns the packed rows that run the prompts, or [] where chunks take hardly more tokens."""
        can_pack = self.batch.compiled.decoder.supports_packed_prefill and self.batch.prompt_positions is None
        if not can_pack or any(self.lengths):
            return []
        lengths = {row: len(prompt) for row, prompt in prompts.items()}
        return plan_packed_prefill(lengths, len(self.all_rows), max_chunk_tokens(self.session, self.batch))

    def step(self, tokens: np.ndarray | mx.array, counts: list[int]) -> mx.array:
        """Returns the logits [rows, vocab] after tokens, int32 [rows, n], of which row r has the first counts[r].

        Raises CacheFullError, before anything is done, where a prompt cache has no slots for them.
        """
        positions = None
        if self.batch.prompt_positions is not None:
            positions = self.batch.prompt_positions.step_positions(self.lengths, tokens.shape[1], self.rows_per_prompt)
        logits = self._run_with_room(lambda: self.session.step(tokens, counts, positions))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits

    def _run_with_room(self, run: Callable[[], mx.array]) -> mx.array:
        """Runs a step; where a prompt cache is full, again without the rows that have ended."""
        try:
            return run()
        except CacheFullError:
            ended = {index: row.token_ids for index, row in self._rows.items() if not row.is_live}
            if not any(self.lengths[index] for index in ended):
                raise
            self.session.end_rows([ended.get(row) for row in self.all_rows])
            self.lengths = [0 if row in ended else length for row, length in enumerate(self.lengths)]
            return run()

    def store_prefixes(self) -> None:
        """Stores the rows' sequences in the prompt cache, where there is one; of a beam search, the prompts. Rows
        whose scores left no token are not stored."""
        if self.batch.prompt_cache is not None:
            sequences = {
                row: self._rows[row].token_ids if row in self._rows else self.prompt_tokens(row)
                for row in self.member_rows
                if not self._has_fault(row)
            }
            self.session.store_prefixes([sequences.get(row) for row in self.all_rows])

    def _has_fault(self, row: int) -> bool:
        per_prompt, prompt = self.batch.settings.num_return_sequences, self.prompt_of(row)
        first = prompt * per_prompt
        return any(index in self.batch.faults for index in range(first, first + per_prompt))

    def verify_drafts(self, drafts: DraftArrays) -> mx.array:
        """Returns the logits [rows, nodes, vocab] after each node of the rows' draft trees; `accept_drafts` then takes
        a path of each. Raises CacheFullError, before anything is done, where a prompt cache has no slots for them."""
        return self._run_with_room(
            lambda: self.session.verify_draft(drafts.tokens, drafts.ancestor_mask, drafts.depths)
        )

    def accept_drafts(self, paths: Sequence[Sequence[int]]) -> None:
        """Appends to each row r the tokens of the nodes paths[r] of its verified tree."""
        self.session.accept(paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def fork(self, parents: list[int]) -> None:
        """Makes each row r continue after the tokens of row parents[r]."""
        if parents != list(self.all_rows):
            self.session.fork(parents)
            self.lengths = [self.lengths[parent] for parent in parents]

    def make_rows(self) -> dict[int, Row]:
        """Returns the rows of the group's prompts, without new tokens."""
        self._rows = {row: self.batch.make_row(row) for row in self.member_rows}
        return self._rows

    def initial_state(self, keys: list[mx.array]) -> tuple[ProcessorState, ProcessorState]:
        """Returns the processors' state after the prompts, and the part of it that stays fixed."""
        batch = self.batch
        prompts = [self.prompt_tokens(row) for row in self.all_rows]
        encoder_input_ids = [batch.encoder_input_ids[self.prompt_of(row)] for row in self.all_rows]
        # Where the positions end first, max_length is still the requested one.
        max_lengths = [len(prompt) + batch.context.new_token_limit(len(prompt)) if prompt else 0 for prompt in prompts]
        return self.selection.initial_state(ProcessorInputs(prompts, encoder_input_ids, max_lengths, keys))

    def select_and_read(
        self, logits: mx.array, state: ProcessorState, fixed: ProcessorState, sequences: Sequence[list[int] | None]
    ) -> tuple[np.ndarray, ProcessorState]:
        """Selects the next token after each sequence, None for a row that gets none, and evaluates the step.

        Returns what the selection returned, int32 [rows, 1 or 2], and the next state.
        """
        arrays = fixed | self.host_inputs.arrays_for(sequences)
        selected_tokens, state = self.selection.select_tokens(logits, state, arrays)
        del logits
        return read_selection(self.session, selected_tokens, state), state


def read_selection(session: Session, selected_tokens: mx.array, state: ProcessorState) -> np.ndarray:
    """Evaluates a step of the session, its selection and the next state at once, and returns the selection."""
    session.evaluate(selected_tokens, *state.values())
    return np.array(selected_tokens)
