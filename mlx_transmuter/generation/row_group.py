"""The prompts of a batch that share one run of the decoder: their parts, steps and forks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch
from mlx_transmuter.generation.drafts.draft_tree import slots_with_drafts
from mlx_transmuter.generation.logits.host_processor_inputs import HostProcessorInputs
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.row import Row
from mlx_transmuter.runtime.prefill_schedule import PackedPrefillRow, plan_packed_prefill, prefill_chunks
from mlx_transmuter.runtime.session import Session


class RowGroup:
    """A run of the decoder for the prompts `members`; the rows of the batch's other prompts only pad.

    Prompt i has the rows i × width to i × width + width - 1: its beams, or the texts sampled for it.
    """

    def __init__(self, batch: Batch, members: Sequence[int]):
        self.batch, self.prompt_indices, self.rows_per_prompt = batch, members, batch.settings.rows_per_prompt
        decoder, self.selection = batch.compiled.decoder, batch.compiled.selection
        self.all_rows = range(batch.compiled.batch_size * self.rows_per_prompt)
        self.member_rows = [row for row in self.all_rows if row // self.rows_per_prompt in members]
        self.lengths = [0] * len(self.all_rows)
        total = [0] * len(self.all_rows)
        for row in self.member_rows:
            size = len(batch.prompts[row // self.rows_per_prompt]) + batch.new_token_limits[row // self.rows_per_prompt]
            total[row] = min(size, decoder.max_positions or size)
        inputs = batch.extra_inputs
        if self.rows_per_prompt > 1:
            inputs = {name: mx.repeat(array, self.rows_per_prompt, axis=0) for name, array in inputs.items()}
        if guesses := batch.compiled.max_draft_tokens:
            block = 1 if batch.prompt_cache is None else batch.prompt_cache.kv_cache.block_size
            new = [batch.new_token_limits[row // self.rows_per_prompt] for row in self.all_rows]
            total = [
                slots_with_drafts(size, n, guesses, block) if size else 0 for size, n in zip(total, new, strict=True)
            ]
        self.max_lengths = total
        if batch.prompt_cache is None:
            self.session = decoder.begin_session(total, inputs, paged=self.rows_per_prompt > 1 or guesses > 0)
        else:
            prompts = [
                self._prompt_of_row(row) if total[row] and not row % self.rows_per_prompt else []
                for row in self.all_rows
            ]
            self.session = decoder.begin_session(total, inputs, kv_cache=batch.prompt_cache.kv_cache, prompts=prompts)
            self.lengths = self.session.lengths.tolist()
        self._rows: dict[int, Row] = {}
        self.host_inputs = HostProcessorInputs(
            batch.settings, batch.context.processors, decoder.vocab_size, batch.prompts, batch.encoder_input_ids
        )

    def prefill(self) -> mx.array | None:
        """The logits after the prompts, [rows, vocab]; None if the run was cancelled.

        A prompt runs in the first of its rows alone, without what a prompt cache has of it, and the others then
        continue it.
        """
        first = [prompt * self.rows_per_prompt for prompt in self.prompt_indices]
        prompts = {row: self._prompt_of_row(row)[self.lengths[row] :] for row in first}
        if lanes := self._plan_packed_prefill(prompts):
            last = self._prefill_packed(prompts, lanes)
        else:
            last = prefill_in_chunks(
                self.session, self.step, prompts, self.batch, self.batch.compiled.decoder.prompt_mode
            )
        if last is None or self.rows_per_prompt == 1:
            return last
        parents = [row // self.rows_per_prompt * self.rows_per_prompt for row in self.all_rows]
        self.fork(parents)
        return last[mx.array(parents)]

    def _plan_packed_prefill(self, prompts: Mapping[int, list[int]]) -> list[PackedPrefillRow]:
        """The lanes to run whole prompts in, several in one, where that takes fewer tokens; else none."""
        if (
            not self.batch.compiled.decoder.supports_packed_prefill
            or self.batch.prompt_positions is not None
            or any(self.lengths)
        ):
            return []
        lengths = {row: len(prompt) for row, prompt in prompts.items()}
        return plan_packed_prefill(lengths, len(self.all_rows), _max_chunk_tokens(self.session, self.batch))

    def _prefill_packed(self, prompts: Mapping[int, list[int]], packs: Sequence[PackedPrefillRow]) -> mx.array | None:
        """The logits after the prompts, from a step for each lane."""
        last = None
        for members, size in packs:
            if self.batch.cancelled:
                return None
            logits = self.session.prefill_packed(
                [prompts[row] if row in members else [] for row in self.all_rows], size
            )
            for row in members:
                self.lengths[row] = len(prompts[row])
            ends = mx.array([row in members for row in self.all_rows])[:, None]
            last = logits if last is None else mx.where(ends, logits, last)
            del logits
            self.session.evaluate(last)
        return last

    def step(self, tokens: np.ndarray | mx.array, counts: list[int]) -> mx.array:
        """The logits [rows, vocab] after tokens, int32 [rows, n], of which row r has the first counts[r]."""
        places = None
        if self.batch.prompt_positions is not None:
            places = self.batch.prompt_positions.step_positions(self.lengths, tokens.shape[1], self.rows_per_prompt)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return self.session.step(tokens, counts, places)

    def store_prefixes(self) -> None:
        """Leaves the rows' texts in the prompt cache, where there is one; of a beam search, the prompts."""
        if self.batch.prompt_cache is not None:
            texts = {
                row: self._rows[row].sequence if row in self._rows else self._prompt_of_row(row)
                for row in self.member_rows
            }
            self.session.store_prefixes([texts.get(row) for row in self.all_rows])

    def verify_drafts(self, tokens: np.ndarray, ancestor_mask: np.ndarray, depths: np.ndarray) -> mx.array:
        """The logits [rows, nodes, vocab] after each node of the rows' trees; `keep` then takes a path of each."""
        return self.session.verify_draft(tokens, ancestor_mask, depths)

    def accept_drafts(self, paths: Sequence[Sequence[int]]) -> None:
        """The tokens of row r go on along the nodes paths[r] of the tree that was guessed."""
        self.session.accept(paths)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def fork(self, parents: list[int]) -> None:
        """Row r continues row parents[r] from now on."""
        if parents != list(self.all_rows):
            self.session.fork(parents)
            self.lengths = [self.lengths[parent] for parent in parents]

    def make_rows(self) -> dict[int, Row]:
        """The rows of the group's prompts, without new tokens."""
        batch = self.batch
        self._rows = {
            row: Row(self._prompt_of_row(row), batch.new_token_limits[row // self.rows_per_prompt])
            for row in self.member_rows
        }
        return self._rows

    def initial_state(self, keys: list[mx.array]) -> tuple[ProcessorState, ProcessorState]:
        """What the processors know of the rows after their prompts, and the part of it that stays fixed."""
        batch = self.batch
        prompts = [batch.prompts[row // self.rows_per_prompt] for row in self.all_rows]
        sources = [batch.encoder_input_ids[row // self.rows_per_prompt] for row in self.all_rows]
        # Where positions end first, max_length still is what was asked for.
        ends = [len(prompt) + batch.context.new_token_limit(len(prompt)) if prompt else 0 for prompt in prompts]
        return self.selection.initial_state(prompts, sources, ends, keys)

    def _prompt_of_row(self, row: int) -> list[int]:
        return self.batch.prompts[row // self.rows_per_prompt]


def prefill_in_chunks(
    session: Session,
    step: Callable[[np.ndarray, list[int]], mx.array],
    sequences: Mapping[int, Sequence[int]],
    batch: Batch,
    prompt_mode: str = "parts",
) -> mx.array | None:
    """The logits [rows, vocab] after the tokens texts[r] of some rows, which a run reads by `step` (`prompt_parts` says
    how); None if the batch was cancelled.

    Of the logits only those of a row's last token are kept, from the part in which it came.
    """
    rows = range(batch.compiled.batch_size * batch.settings.rows_per_prompt)
    start, last = 0, None
    for part in prefill_chunks(max(map(len, sequences.values())), _max_chunk_tokens(session, batch), prompt_mode):
        if batch.cancelled:
            return None
        tokens = np.zeros((len(rows), part), np.int32)
        counts = [0] * len(rows)
        for row, text in sequences.items():
            piece = text[start : start + part]
            tokens[row, : len(piece)] = piece
            counts[row] = len(piece)
        logits = step(tokens, counts)
        start += part
        ends = np.array([counts[row] > 0 and len(sequences[row]) <= start for row in rows])
        if ends.any():
            last = logits if last is None else mx.where(mx.array(ends)[:, None], logits, last)
        del logits
        session.evaluate(*([] if last is None else [last]))
    assert last is not None  # each text has tokens
    return last


def _max_chunk_tokens(run: Session, batch: Batch) -> int:
    """The most tokens of a step of a prompt."""
    return min(batch.context.prefill_step_size, run.max_step_tokens or batch.context.prefill_step_size)
