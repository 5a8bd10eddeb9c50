"""LengthSwitchSession: a session of a decoder whose keys follow from how many tokens a row has (see LengthSwitches)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.runtime.buckets import StepColumns
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.prefill_schedule import default_prefill_step_size, prefill_chunks
from mlx_transmuter.runtime.row_history import RowHistory
from mlx_transmuter.runtime.row_slots import RowSlots
from mlx_transmuter.runtime.session import run_by_side

if TYPE_CHECKING:
    from mlx_transmuter.runtime.decoder import Decoder


class LengthSwitchSession(CacheSession):
    """A CacheSession whose rows pass length switches, each as if it were alone.

    A row that comes to another side is computed anew from its first token, in chunks as its prompt was; the step that
    brought it there takes as long as a prompt of its length, and no more memory than the row has already. A step whose
    rows are on several sides runs once for each of them.

    prompts: of the rows that begin with stored tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_lengths: Sequence[int],
        extra_inputs: Mapping[str, mx.array],
        row_slots: RowSlots,
        stored_lengths: Sequence[int] | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ):
        super().__init__(decoder, max_lengths, extra_inputs, row_slots, stored_lengths)
        prompt_lengths = [len(prompt) for prompt in prompts] or [0] * decoder.rows
        # The side that the keys of each row are of, and the tokens that it will have before its logits count.
        self.sides = decoder.sides_of(np.array(prompt_lengths, np.int32))
        self._expected_lengths = np.zeros(decoder.rows, np.int32)
        self._max_chunk_tokens = default_prefill_step_size()
        width = min(int(self.max_lengths.max()), decoder.signature.length_switches.last)
        self._history = RowHistory(decoder.rows, width)
        if self.lengths.any():
            self._append_history([prompt[:stored] for prompt, stored in zip(prompts, self.lengths, strict=True)])
        self._draft_tokens = np.zeros((decoder.rows, 0), np.int32)

    @property
    def prefix_roots(self) -> np.ndarray:
        """See CacheSession.prefix_roots."""
        return self.sides

    def announce_prompts(self, lengths: Sequence[int], max_chunk_tokens: int) -> None:
        """See DecoderSession.announce_prompts."""
        self._expected_lengths = np.asarray(lengths, np.int32)
        self._max_chunk_tokens = max_chunk_tokens

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """See DecoderSession.step."""
        tokens = mx.array(self._check_tokens(tokens))
        new = self._check_counts(tokens, counts)
        sides = self._next_sides(np.maximum(self.lengths + new, self._expected_lengths), new > 0)
        self._reserve(new, restart_lengths=self._restart_lengths(sides))
        self._change_sides(sides)
        self._history.append(tokens, new, self.lengths, positions)
        return self._step_by_side(tokens, new, positions)

    def _step_by_side(self, tokens: Any, new: np.ndarray, positions: Any) -> mx.array:
        def run(side: int, members: np.ndarray) -> mx.array:
            return self._run_step(tokens, np.where(members, new, 0).astype(np.int32), positions, side)

        return run_by_side(self.sides, new > 0, run, self.evaluate)

    def _next_sides(self, lengths: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Returns the sides int32 [rows] of the rows when the active ones, bool [rows], have `lengths` tokens."""
        return np.where(active, self.decoder.sides_of(lengths), self.sides)

    def _restart_lengths(self, sides: np.ndarray) -> np.ndarray:
        """Returns how many tokens int32 [rows] of each row are computed anew where the rows change to these sides."""
        changed = (sides != self.sides) & (self.lengths > 0)
        if changed.any() and self.decoder.needs_equal_lengths:
            changed = self.lengths > 0  # a step then takes no row of another length, though it has no token in it
        return np.where(changed, self.lengths, 0).astype(np.int32)

    def _change_sides(self, sides: np.ndarray) -> None:
        """Brings the rows to these sides, for which their slots are reserved."""
        lengths, self.sides = self._restart_lengths(sides), sides
        if lengths.any():
            self._recompute(lengths)

    def _recompute(self, lengths: np.ndarray) -> None:
        """Computes the keys and values of rows anew for their sides: of all lengths[r] tokens of row r, 0 for none."""
        self.restart(lengths > 0)
        start = 0
        tokens, positions = self._history.tokens, self._history.positions
        limit = min(self._max_chunk_tokens, self.max_step_tokens or self._max_chunk_tokens)
        for size in prefill_chunks(int(lengths.max()), limit, self.decoder.prompt_mode):
            span = slice(start, start + size)
            counts = np.clip(lengths - start, 0, size).astype(np.int32)
            logits = self._step_by_side(tokens[:, span], counts, None if positions is None else positions[..., span])
            self.evaluate(logits)
            start += size

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        """See CacheSession.prefill_packed."""
        counts = self._check_packed_prompts(prompts, seq)
        self._reserve(counts)
        self.sides = np.where(counts > 0, self.decoder.sides_of(counts), self.sides)
        self._append_history(prompts)

        def run(side: int, members: np.ndarray) -> mx.array:
            of_side = [prompt if is_member else [] for prompt, is_member in zip(prompts, members, strict=True)]
            return self._run_packed_prefill(of_side, np.where(members, counts, 0).astype(np.int32), seq, side)

        return run_by_side(self.sides, counts > 0, run, self.evaluate)

    def draft_limits(self) -> list[int]:
        """See DecoderSession.draft_limits."""
        return [self.decoder.next_switch(length + 1) - length - 1 for length in self.lengths.tolist()]

    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array:
        """See CacheSession.verify_draft; raises DecoderError for draft tokens deeper than `draft_limits` too."""
        depths = np.asarray(depths, np.int32)
        if (depths.max(axis=1) > self.draft_limits()).any():
            found = f"draft tokens {depths.max(axis=1).tolist()} deep after rows of {self.lengths.tolist()} tokens"
            raise DecoderError(found, f"at most {self.draft_limits()}, before a length switch", "draft fewer tokens")
        self._draft_tokens = np.asarray(tokens, np.int32)
        return super().verify_draft(tokens, ancestor_mask, depths)

    def _prepare_draft(self, depths: np.ndarray) -> None:
        sides = self._next_sides(self.lengths + 1, depths.max(axis=1) >= 0)
        self._reserve_draft(depths, self._restart_lengths(sides))
        self._change_sides(sides)

    def _run_draft(
        self,
        tokens: mx.array,
        ancestor_mask: mx.array,
        positions: np.ndarray,
        slots: np.ndarray,
        columns: StepColumns,
        side: int = 0,
    ) -> mx.array:
        def run(side: int, members: np.ndarray) -> mx.array:
            places, targets = (np.where(members[:, None], x, -1).astype(np.int32) for x in (positions, slots))
            return super(LengthSwitchSession, self)._run_draft(tokens, ancestor_mask, places, targets, columns, side)

        return run_by_side(self.sides, positions.max(axis=1) >= 0, run, self.evaluate)

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """See CacheSession.accept."""
        lengths = self.lengths
        super().accept(accepted)
        paths = [self._draft_tokens[row, list(path)].tolist() for row, path in enumerate(accepted)]
        self._append_history(paths, lengths)

    def _append_history(self, row_tokens: Sequence[Sequence[int]], lengths: np.ndarray | None = None) -> None:
        """Adds tokens to the history of each row after its first lengths[r], by default from its beginning."""
        counts = np.array([len(tokens) for tokens in row_tokens], np.int32)
        tokens = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
        for row, count in enumerate(counts.tolist()):
            tokens[row, :count] = row_tokens[row]
        self._history.append(tokens, counts, np.zeros_like(counts) if lengths is None else lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        """See CacheSession.truncate."""
        shorter = np.asarray(lengths) < self.lengths
        super().truncate(lengths)
        self._expected_lengths = np.where(shorter, 0, self._expected_lengths)

    def fork(self, parents: Sequence[int]) -> None:
        """See CacheSession.fork."""
        super().fork(parents)
        order = list(parents)
        self.sides, self._expected_lengths = self.sides[order], self._expected_lengths[order]
        self._history.fork(parents)
