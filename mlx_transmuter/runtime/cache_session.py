"""CacheSession: a session whose keys and values are in pools.

A program over pools writes its keys and values itself. A step of another graph reads what its rows have so far and
returns the new keys and values; they are written into the pools at the beginning of the next step, so that each pool is
written once and read only after the write, which MLX then does in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import BlockManager, KVCache, Pools
from mlx_transmuter.runtime.buckets import StepColumns, choose_window_context, context_bucket
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.row_slots import RowSlots
from mlx_transmuter.runtime.session import DecoderSession
from mlx_transmuter.runtime.steps.draft import DraftStep, DraftStepInputs
from mlx_transmuter.runtime.steps.graph import is_token, row_positions, updated_states
from mlx_transmuter.runtime.steps.packed_prefill import PackedPrefillInputs, PackedPrefillStep
from mlx_transmuter.runtime.steps.past_present import PastPresentInputs, PastPresentStep
from mlx_transmuter.runtime.steps.pool_write import PoolWriteInputs, PoolWriteStep
from mlx_transmuter.runtime.steps.pooled import PooledStep, PooledStepInputs

if TYPE_CHECKING:
    from mlx_transmuter.runtime.decoder import Decoder


class CacheSession(DecoderSession):
    """A session over a KVCache, which also carries the rows' states.

    row_slots: which slots hold which position of each row. stored_lengths: the tokens of each row that are in the cache
    already.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_lengths: Sequence[int],
        extra_inputs: Mapping[str, mx.array],
        row_slots: RowSlots,
        stored_lengths: Sequence[int] | None = None,
    ):
        super().__init__(decoder, max_lengths, extra_inputs)
        self.row_slots = row_slots
        if stored_lengths is not None:
            self.lengths = np.asarray(stored_lengths, np.int32)
        self.states = list(decoder.graph.step_inputs.zero_states(decoder.rows).values())
        self._pending_write: PoolWriteInputs | None = None
        ring = row_slots.ring
        self.max_step_tokens = ring.max_step_tokens if ring else None
        # A step can be built while the one before it runs: Pools.evaluate waits for it, so no write meets its reads. On
        # the CPU backend the two share the cores and nothing is won.
        self.runs_ahead = decoder.signature.uses_pools and mx.default_device() == mx.gpu

    @property
    def kv_cache(self) -> KVCache:
        """The cache that the rows' slots are in."""
        return self.row_slots.kv_cache

    @property
    def block_manager(self) -> BlockManager:
        """Who owns which slot."""
        return self.kv_cache.block_manager

    @property
    def pools(self) -> Pools:
        """The keys and values."""
        return self.kv_cache.pools

    @property
    def prefix_roots(self) -> np.ndarray:
        """The root int32 [rows] under which a row's prefix is stored: the side that its keys are of."""
        return np.zeros(self.decoder.rows, np.int32)

    @property
    def copied_slots(self) -> int:
        """How many slots were copied, of blocks that rows shared and of drafts in blocks of several."""
        return self.kv_cache.copied_slots

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """See DecoderSession.step."""
        tokens = mx.array(self._check_tokens(tokens))
        return self._run_step(tokens, self._check_counts(tokens, counts), positions)

    def _run_step(self, tokens: Any, new: np.ndarray, positions: Any, side: int = 0) -> mx.array:
        """Runs a step of rows that are all on one side of the decoder's length switches."""
        tokens = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
        seq = tokens.shape[1]
        if self.decoder.needs_equal_lengths and (self.lengths[new > 0] != self.lengths.max()).any():
            raise DecoderError(f"rows of {self.lengths.tolist()} tokens", "rows of one length where the cache grows")
        if self.decoder.plan.padding_side == "none" and (new[new > 0] != seq).any():
            raise DecoderError(f"counts {new.tolist()} of {seq} tokens", "no padding, which would change the states")
        positions = None if positions is None else mx.array(positions)
        self._reserve(new)
        run = self._pooled_step if self.decoder.signature.uses_pools else self._past_present_step
        return run(tokens, new, positions, side)

    def _pooled_step(self, tokens: mx.array, counts: np.ndarray, positions: mx.array | None, side: int) -> mx.array:
        seq, lengths = tokens.shape[1], mx.array(self.lengths)
        token_positions = mx.array(_token_positions(self.lengths, counts, seq))
        columns = self._step_columns(int((self.lengths + counts).max()), seq)
        self._append_tokens(counts)
        slot_table, window_table = self._slot_tables(columns)
        step = PooledStep(seq, columns, self.kv_cache.head_span, self.row_slots.paged, positions is not None, side)
        outputs = self.decoder.compile_once(step)(
            PooledStepInputs(
                extra_inputs_and_states=self._extra_inputs_and_states(),
                tokens=tokens,
                lengths=lengths,
                counts=mx.array(counts),
                token_positions=token_positions,
                slot_table=slot_table,
                window_table=window_table,
                positions=positions,
                pools=self.pools.take(),
            )
        )
        self.states = outputs.states
        self.pools.put(outputs.pools)
        return outputs.logits

    def _past_present_step(
        self, tokens: mx.array, counts: np.ndarray, positions: mx.array | None, side: int
    ) -> mx.array:
        self._write_pending()
        decoder, (rows, seq), length = self.decoder, tokens.shape[:2], int(self.lengths.max())
        context = length if decoder.needs_exact_past else decoder.past_columns(length, seq)
        step = PastPresentStep(decoder.cache_mode, seq, context, self.kv_cache.head_span, positions is not None, side)
        outputs = decoder.compile_once(step)(
            PastPresentInputs(
                pools=self.pools.arrays,
                tokens=tokens,
                lengths=mx.array(np.full(rows, length, np.int32) if decoder.needs_exact_past else self.lengths),
                counts=mx.array(counts),
                slot_table=mx.array(self.row_slots.table(self.lengths, max(1, context))),
                extra_inputs_and_states=self._extra_inputs_and_states(),
                positions=positions,
            )
        )
        self.states = outputs.states
        written = _token_positions(self.lengths, counts, seq)
        self._append_tokens(counts)
        table = self.row_slots.table(self.lengths, context_bucket(int(self.lengths.max()), rows))
        self._pending_write = PoolWriteInputs([], outputs.new_vectors, mx.array(written), mx.array(table))
        return outputs.logits

    def _write_pending(self) -> None:
        """Writes the keys and values of the last step into the pools."""
        pending, self._pending_write = self._pending_write, None
        if pending is not None:
            write = PoolWriteStep(pending.positions.shape[1], pending.slot_table.shape[1], self.kv_cache.head_span)
            self.pools.put(self.decoder.compile_once(write)(pending._replace(pools=self.pools.take())))

    def _extra_inputs_and_states(self) -> dict[str, mx.array]:
        """Returns the graph's other inputs, the rows' states among them."""
        pairs = zip(self.decoder.signature.state_pairs, self.states, strict=True)
        return {**self.extra_inputs, **{pair.past: array for pair, array in pairs}}

    def _step_columns(self, length: int, seq: int) -> StepColumns:
        """Returns the columns of a step of seq tokens after which the longest row has `length` tokens.

        Raises DecoderError for more tokens than a ring has slots beside the window.
        """
        ring, context = self.row_slots.ring, context_bucket(length, self.decoder.rows)
        if ring is None:
            window = None if self.decoder.ring else self.decoder.max_window
            window_context = choose_window_context(window, seq, context, self.row_slots.paged)
            return StepColumns(context, window_context=window_context)
        if length <= ring.slots:
            return StepColumns(min(context, ring.slots))
        if seq > ring.max_step_tokens:
            found = f"a step of {seq} tokens over a window of {ring.window}"
            raise DecoderError(found, f"at most {ring.max_step_tokens}", "run the prompt in chunks")
        return StepColumns(ring.slots, is_ring=True)

    def _slot_tables(self, columns: StepColumns) -> tuple[mx.array | None, mx.array | None]:
        """Returns the slot table of the columns, and that of the layers with a window, as steps take them."""
        table, lengths = self.row_slots.table, self.lengths
        return (
            mx.array(table(lengths, columns.context, ring=columns.is_ring)) if self.row_slots.paged else None,
            mx.array(table(lengths, columns.window_context, ring=True)) if columns.window_context else None,
        )

    def _reserve(
        self, counts: np.ndarray, draft_counts: Sequence[int] = (), restart_lengths: np.ndarray | None = None
    ) -> None:
        """Makes room for the rows' new tokens before anything of a step is done. The pools may grow."""
        self.row_slots.free_unreachable(self.lengths)
        self.row_slots.reserve(counts, draft_counts, restart_lengths)

    def _append_tokens(self, counts: np.ndarray) -> None:
        """Gives slots to the rows' new tokens."""
        lengths = self.lengths + counts
        self.row_slots.append(counts, lengths)
        self.lengths = lengths

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        """Returns lazy logits [rows, vocab] after prompts that run one after another in one row of seq tokens.

        prompts: one for each row, which has no tokens yet; [] for none, whose logits are unspecified. seq: at least
        their sum. Raises DecoderError for a decoder that doesn't support it, rows with tokens, or prompts too long.
        """
        counts = self._check_packed_prompts(prompts, seq)
        self._reserve(counts)
        return self._run_packed_prefill(prompts, counts, seq)

    def _run_packed_prefill(
        self, prompts: Sequence[Sequence[int]], counts: np.ndarray, seq: int, side: int = 0
    ) -> mx.array:
        self._append_tokens(counts)
        # Rows of an earlier packed prefill may be longer than these.
        table, span = self.row_slots.table(self.lengths, int(self.lengths.max())), self.kv_cache.head_span
        step = self.decoder.compile_once(PackedPrefillStep(seq, span, side))
        outputs = step(PackedPrefillInputs.pack(self.pools.take(), prompts, table, seq))
        self.pools.put(outputs.pools)
        return outputs.logits

    def _check_packed_prompts(self, prompts: Sequence[Sequence[int]], seq: int) -> np.ndarray:
        """Returns the lengths of the prompts int32 [rows]."""
        self._check_tokens(np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts]))
        counts, max_step_tokens = np.array([len(prompt) for prompt in prompts], np.int32), self.max_step_tokens
        if not self.decoder.supports_packed_prefill:
            found, do = "a packed prefill for a graph whose attention isn't over pools", "run plain steps"
            raise DecoderError(found, "one that the conversion rewrote", do)
        if len(counts) != len(self.lengths) or (self.lengths * counts).any() or (counts > self.max_lengths).any():
            found = f"prompts of {counts.tolist()} tokens for rows of {self.lengths.tolist()}"
            raise DecoderError(found, f"prompts of at most {self.max_lengths.tolist()} tokens, for rows without tokens")
        if max_step_tokens and counts.max() > max_step_tokens:
            found = f"prompts of {counts.tolist()} tokens"
            raise DecoderError(found, f"at most {max_step_tokens} each", "run them in chunks")
        if not 0 < counts.sum() <= seq:
            raise DecoderError(f"{counts.sum()} tokens in a packed prefill of {seq}", "1 or more, as many as fit")
        return counts

    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array:
        """Returns lazy logits [rows, seq, vocab] after each token of a draft; `accept` then takes some of them.

        tokens: int32 [rows, seq]. ancestor_mask: bool [rows, seq, seq], whether token i sees token j: its ancestors in
        the draft tree and itself. depths: int32 [rows, seq], how many draft tokens come before each; -1 for padding.
        They take slots of their own, for which max_lengths must have room. Raises DecoderError for a decoder that
        doesn't support drafts, a session without blocks, or draft tokens past max_lengths.
        """
        if not self.row_slots.paged or self.row_slots.has_draft:
            expected, do = "a paged session, and the last draft accepted", "begin_session(..., paged=True)"
            raise DecoderError("a draft in this session", expected, do)
        tokens, ancestor_mask = mx.array(self._check_tokens(tokens)), mx.array(ancestor_mask)
        depths, seq = np.asarray(depths, np.int32), tokens.shape[1]
        # The table has a column for each draft token's position too.
        columns = self._step_columns(self._check_draft(tokens, depths), seq)
        self._prepare_draft(depths)
        slots = self.row_slots.open_draft((depths >= 0).sum(axis=1).tolist(), seq)
        positions = np.where(depths >= 0, self.lengths[:, None] + depths, -1).astype(np.int32)
        return self._run_draft(tokens, ancestor_mask, positions, slots, columns)

    def _prepare_draft(self, depths: np.ndarray) -> None:
        """Makes room for a draft, before anything of it is done."""
        self._reserve_draft(depths)

    def _reserve_draft(self, depths: np.ndarray, restart_lengths: np.ndarray | None = None) -> None:
        # In blocks of one slot, accepted tokens stay in those of the draft.
        counts = (depths.max(axis=1) + 1) * (self.kv_cache.block_size > 1)
        self._reserve(counts, (depths >= 0).sum(axis=1).tolist(), restart_lengths)

    def _run_draft(
        self,
        tokens: mx.array,
        ancestor_mask: mx.array,
        positions: np.ndarray,
        slots: np.ndarray,
        columns: StepColumns,
        side: int = 0,
    ) -> mx.array:
        """Runs the draft tokens that have a position; see DraftStepInputs."""
        slot_table, window_table = self._slot_tables(columns)
        assert slot_table is not None
        step = DraftStep(tokens.shape[1], columns, self.kv_cache.head_span, side)
        outputs = self.decoder.compile_once(step)(
            DraftStepInputs(
                tokens=tokens,
                positions=mx.array(positions),
                slot_table=slot_table,
                window_table=window_table,
                slots=mx.array(slots),
                ancestor_mask=ancestor_mask,
                extra_inputs=dict(self.extra_inputs),
                pools=self.pools.take(),
            )
        )
        self.pools.put(outputs.pools)
        return outputs.logits

    def _check_draft(self, tokens: mx.array, depths: np.ndarray) -> int:
        """Returns the tokens of the longest row with its deepest draft token. Raises DecoderError for a wrong draft."""
        signature, found, expected = self.decoder.signature, None, ""
        if signature.state_pairs:
            found = f"a draft for a graph with states ({signature.state_pairs[0].past})"
            expected = "a cache of positions, from which draft tokens can be dropped"
        elif not self.decoder.supports_drafts:
            found = "a draft for a graph whose attention isn't over pools"
            expected = "one that the conversion rewrote"
        if found:
            raise DecoderError(found, expected, "run plain steps")
        lengths = self.lengths + depths.max(axis=1) + 1
        if depths.shape != tuple(tokens.shape) or (lengths > self.max_lengths).any():
            raise DecoderError(f"draft tokens up to {lengths.tolist()}", f"at most {self.max_lengths.tolist()}")
        return int(lengths.max())

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Makes the draft tokens accepted[r], a path from the first, the next tokens of row r; call it once the draft
        is evaluated.

        In blocks of one slot they stay where they are, in larger ones they are copied (see copied_slots).
        """
        if not self.row_slots.has_draft:
            raise DecoderError("no draft", "a draft to accept tokens of")
        self.row_slots.accept_draft(accepted)
        self.lengths = self.lengths + np.array([len(path) for path in accepted], np.int32)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drops the tokens of each row after its first lengths[r].

        Raises DecoderError for more tokens than a row has, in a decoder whose states have all tokens in them, and where
        the window before a row's new end has lost its slots.
        """
        new, ring = np.asarray(lengths, np.int32), self.row_slots.ring
        if new.shape != self.lengths.shape or (new < 0).any() or (new > self.lengths).any():
            raise DecoderError(f"rows truncated to {list(lengths)} tokens", f"at most {self.lengths.tolist()}")
        shorter = new < self.lengths
        if self.states and shorter.any():
            raise DecoderError("rows truncated in a decoder with states", "a cache that still has what came before")
        if ring and ((self.row_slots.first_positions() > np.maximum(0, new - ring.window + 1)) & shorter).any():
            found = f"rows of {self.lengths.tolist()} tokens truncated to {new.tolist()}"
            raise DecoderError(found, f"a window of {ring.window} tokens before their ends, still in the cache")
        self._write_pending()
        self.row_slots.truncate(new)
        self.lengths = new

    def fork(self, parents: Sequence[int]) -> None:
        """Makes row r continue after the tokens of row parents[r]: the rows share slots, and nothing moves.

        In blocks of several slots, the last one, partly filled, is copied when a row writes on (see copied_slots).
        """
        if not self.row_slots.paged:
            found, do = "a fork of rows with contiguous slots", "begin_session(..., paged=True)"
            raise DecoderError(found, "rows of blocks", do)
        self._check_parents(parents)
        self._write_pending()
        self.row_slots.fork(parents)
        order = mx.array(list(parents))
        self.states = [
            mx.take(array, order, axis=pair.batch_axis)
            for pair, array in zip(self.decoder.signature.state_pairs, self.states, strict=True)
        ]
        super().fork(parents)

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step: `arrays` with the pools and what the next step will write into them."""
        pending = self._pending_write.new_vectors if self._pending_write else []
        self.pools.evaluate(*arrays, *pending, *self.states, wait=wait)

    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Lets later sessions of a shared cache find what the rows have, once the steps so far are evaluated.

        row_tokens: the tokens of each row from its first; those that no step took yet are left out. None stores
        nothing.
        """
        self._write_pending()
        self.evaluate()
        self.row_slots.store_prefixes(row_tokens, self.lengths, self.prefix_roots)

    def restart(self, rows: np.ndarray) -> None:
        """Drops all tokens of the rows, bool [rows], also of those whose first ones have lost their slots."""
        self._write_pending()
        self.row_slots.restart(rows)
        self.lengths = np.where(rows, 0, self.lengths).astype(np.int32)
        step_inputs, kept = self.decoder.graph.step_inputs, (~rows).astype(np.int32)
        zeros = step_inputs.zero_states(self.decoder.rows)
        pairs = zip(self.decoder.signature.state_pairs, self.states, strict=True)
        states = {pair.present: array for pair, array in pairs}
        self.states = updated_states(self.decoder.graph, zeros, states, mx.array(kept))

    def end_rows(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Stores what rows have, as `store_prefixes` does, and ends them: their slots can be evicted for other rows.

        row_tokens: None for a row that goes on.
        """
        self.store_prefixes(row_tokens)
        ended = [row for row, tokens in enumerate(row_tokens) if tokens is not None]
        self.row_slots.free_rows(ended)
        self.lengths[ended] = 0

    def close(self) -> None:
        """Ends the session. Gives the pools' memory back, unless they outlive it."""
        self._pending_write, self.states = None, []
        self.row_slots.close()


def _token_positions(lengths: np.ndarray, counts: np.ndarray, seq: int) -> np.ndarray:
    """Returns the positions int32 [rows, seq] of counts[r] tokens after lengths[r] others; -1 for the padding."""
    return np.where(is_token(counts, seq), row_positions(lengths, seq), -1).astype(np.int32)
