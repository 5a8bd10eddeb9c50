"""The Decoder: step functions of one decoder, compiled once per shape, and the Runs that own its pools.

A run keeps the keys and values of its rows in pools. A step reads what its rows have so far, runs the graph, and keeps
the new keys and values; they are written into the pools at the beginning of the next step, so that each pool is written
once and read only after the write, which MLX then does in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import BlockManager, KVCache, Pools
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import CacheMode, DecoderSignature
from mlx_transmuter.runtime import steps
from mlx_transmuter.runtime.buckets import (
    Ring,
    StepColumns,
    attention_windows,
    choose_window_context,
    context_bucket,
    power_of_two_bucket,
)
from mlx_transmuter.runtime.full_context import FullContextSession
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.step_inputs import StepInputs
from mlx_transmuter.runtime.steps import DecoderError, DecoderGraph, check_draft, check_new_tokens


class Decoder:
    """The compiled step functions of `module` for batches of `rows` rows.

    mode: the cache mode, by default that of the plan. plan: how it runs, by default as the conversion found.
    max_positions: the most tokens of a row, by default what the model's configuration said. kv_bits: 8 or 4, to keep
    keys and values in so many bits an element, in groups of kv_group_size (see cache.Packing); None keeps them as they
    are. Raises SignatureError for a module that is no decoder, CacheError for other bits or groups.
    """

    def __init__(
        self,
        module: ProgramModule,
        rows: int,
        *,
        cache_mode: CacheMode | None = None,
        plan: RunPlan | None = None,
        max_positions: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ):
        if rows < 1:
            raise DecoderError(f"{rows} rows", "at least one row")
        self.module, self.rows = module, rows
        program = module.program
        self.signature = DecoderSignature.from_program(program)
        self.plan = plan or RunPlan.from_program(program, self.signature)
        self.cache_mode: CacheMode = cache_mode or self.plan.cache_mode
        most = program.metadata.get("max_positions")
        self.max_positions: int | None = max_positions or (most if isinstance(most, int) and 0 < most < 2**31 else None)
        if kv_bits is not None and not self.signature.cache_pairs:
            raise DecoderError(f"kv_bits={kv_bits}", "None: this decoder has no keys and values", "leave out kv_bits")
        self.pool_specs = tuple(steps.pool_spec(entry, kv_bits, kv_group_size) for entry in self.signature.cache_pairs)
        seen = attention_windows(program) if self.signature.uses_pools else set()
        self.max_window = max(seen, default=0) or None
        self.ring = Ring.for_window(max(seen)) if seen and min(seen) else None
        step_inputs = StepInputs.from_program(program, self.signature, max_positions=self.max_positions)
        self.graph = DecoderGraph(module, step_inputs, self.pool_specs, self.plan.row_by_row, self.max_window)
        self.vocab_size = self.signature.vocab_size
        self.compilations = 0
        self._compiled_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        mx.eval(module.parameters())  # a captured weight that was never evaluated would be computed anew at each call

    @property
    def supports(self) -> frozenset[str]:
        """What a run can do beside rows of their own lengths: "pages" and "forks" always, "drafts" and "packed".

        Several guesses or several prompts in one lane need a graph whose attention was rewritten onto the index, that
        gives logits of any token, and that takes rows of several tokens at any time. In another graph the order of the
        columns is the order of the tokens, and a state has all tokens in it, rejected ones too. A lane of several
        prompts has no row of the graph's other inputs.
        """
        always = frozenset({"pages", "forks"})
        several = self.plan == RunPlan(self.plan.cache_mode) and not self.signature.state_pairs
        if not (several and self.signature.uses_pools and self.signature.selects_logits):
            return always
        return always | ({"drafts"} if self.signature.extra_inputs else {"drafts", "packed"})

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether the rows of a run must have one length: the graph takes its positions from it, or no padding may be
        in a step.
        """
        return self.needs_exact_past or self.plan.padding_side == "none"

    @property
    def needs_exact_past(self) -> bool:
        """Whether the graph gets a past, or a mask, of exactly the tokens so far: positions come from its length."""
        told = bool(self.signature.cache_pairs or (self.signature.state_pairs and self.signature.mask_input))
        return self.cache_mode == "grow" and not self.signature.uses_pools and told

    @property
    def prompt_mode(self) -> str:
        """How prompts run: in "parts" of powers of two, "whole", or "single" tokens."""
        return self.plan.prompt_mode

    def group_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """The rows that may share a run, by their prompts' lengths; rows of length 0 are in none.

        All rows share one run, except where `grows` says that they can't.
        """
        found: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            if length:
                found.setdefault(length if self.needs_equal_lengths else 0, []).append(row)
        return list(found.values())

    def past_columns(self, length: int, seq: int) -> int:
        """The columns of the cache that a step of `seq` tokens after `length` reads where the graph gets a buffer.

        A graph with tables of positions or masks has no rows for more than max_positions columns, the step's included.
        """
        if self.cache_mode == "in_place":
            return min(context_bucket(length + seq, self.rows), max(length + seq, self.max_positions or 2**31))
        return min(context_bucket(length, self.rows), max(length, (self.max_positions or 2**31) - seq))

    def full_context_columns(self, length: int) -> int:
        """The columns of a step that reads whole rows of up to that many tokens."""
        return min(context_bucket(length, self.rows), max(length, self.max_positions or 2**31))

    def begin_session(
        self,
        max_lengths: Sequence[int],
        extra_inputs: Mapping[str, mx.array] | None = None,
        *,
        paged: bool = False,
        block_size: int = 1,
        kv_cache: KVCache | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ) -> CacheSession | FullContextSession:
        """A run without tokens, or with those that are in `store` already.

        total: the most tokens that each row will hold, 0 for a padding row. inputs: arrays of the graph's other inputs
        (an encoder's outputs), one row for each row. paged: slots are handed out in pages of `block`, so that rows can
        fork; otherwise each row has one run of slots. store: pools of the decoder's `kinds` that outlive the run, which
        is then paged as they are: each row begins with the most first tokens of its prompt, of `prompts`, that they
        hold, as `Run.lengths` says; never with all of them. Raises DecoderError for a wrong number of rows, an input
        that lacks, or other pools; CacheError for more tokens than the store takes.
        """
        if len(max_lengths) != self.rows:
            raise DecoderError(f"{len(max_lengths)} rows", f"{self.rows}")
        given = dict(extra_inputs or {})
        if given.keys() != set(self.signature.extra_inputs):
            raise DecoderError(f"the inputs {sorted(given)}", f"the graph's {sorted(self.signature.extra_inputs)}")
        if not self.signature.pairs:
            return FullContextSession(self, max_lengths, given)
        if kv_cache is None:
            return CacheSession(self, max_lengths, given, block_size if paged else None)
        if given or kv_cache.pool_specs != self.pool_specs or len(prompts) != self.rows:
            found = f"pools of {kv_cache.pool_specs}, the inputs {sorted(given)} and {len(prompts)} prompts"
            expected = f"pools of {self.pool_specs}, no inputs but tokens and {self.rows} prompts"
            raise DecoderError(found, expected, "give a store of this decoder's kinds, and a decoder of tokens alone")
        return CacheSession(self, max_lengths, given, kv_cache.block_size, kv_cache, prompts)

    def compile_once(self, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The compiled function of that key, made and counted at its first use."""
        if key not in self._compiled_functions:
            self.compilations += 1
            self._compiled_functions[key] = mx.compile(make())
        return self._compiled_functions[key]

    def step_function(
        self, seq: int, columns: StepColumns, has_positions: bool, block: int, paged: bool
    ) -> Callable[..., Any]:
        """The function of a step of `seq` tokens over so many columns of the cache (see steps.py)."""
        key = (seq, columns, has_positions, block, paged)
        if self.signature.uses_pools:
            return self.compile_once(key, lambda: steps.make_pooled_step(self.graph, seq, columns, block, paged))
        context, mode = columns.context, self.cache_mode
        return self.compile_once(
            (mode, *key), lambda: steps.make_past_present_step(self.graph, mode, seq, context, block)
        )

    def write_function(self, seq: int, context: int, block: int) -> Callable[..., Any]:
        """The function that writes the keys and values of `seq` tokens into the pools."""
        return self.compile_once(("write", seq, context, block), lambda: steps.make_pool_write(self.pool_specs, block))


class CacheSession:
    """One generation of a decoder's rows: it owns their pools and knows which slot holds which position of each row."""

    def __init__(
        self,
        decoder: Decoder,
        total: Sequence[int],
        given: Mapping[str, mx.array],
        block: int | None,
        store: KVCache | None = None,
        prompts: Sequence[Sequence[int]] = (),
    ):
        self.decoder, self.extra_inputs, self.has_shared_cache = decoder, given, store is not None
        self.max_lengths = np.asarray(total, np.int32)
        self.lengths = np.zeros(decoder.rows, np.int32)
        self.paged = block is not None
        # Rows that outgrow the ring keep the tokens in the window alone; a store that outlives the run keeps all.
        ring = decoder.ring
        self.ring = ring if ring is not None and int(self.max_lengths.max()) > ring.slots else None
        self._peak_lengths = self.lengths
        if store is None:
            # Few sizes, of rows and of all pages, so that runs share steps: one is compiled for that of its pools.
            # Without pages each row is one run of slots.
            if block is None:
                one = self.ring.slots if self.ring else power_of_two_bucket(int(self.max_lengths.max()))
                self.kv_cache = KVCache(decoder.pool_specs, decoder.rows * one, one, run_slots=one)
            else:
                held = [min(int(size), self.ring.slots + block) if self.ring else int(size) for size in total]
                slots = sum(-(-size // block) * block for size in held)
                slots = max(1, slots) if self.ring else power_of_two_bucket(slots)  # a ring has a size already
                self.kv_cache = KVCache(decoder.pool_specs, -(-slots // block) * block, block)
            self._sequences = [self.block_manager.open()[0] if size else None for size in total]
        else:
            self.kv_cache = store
            self._sequences, stored = store.open_sequences(prompts, total, equal_prefixes=decoder.needs_equal_lengths)
            self.lengths = np.asarray(stored, np.int32)
        self.states = list(decoder.graph.step_inputs.zero_states(decoder.rows).values())
        self._pending_write: tuple[list[mx.array], mx.array, mx.array] | None = None
        self._draft_sequences: list[int] | None = None
        # A step can be built while the one before it runs: Pools.evaluate waits for it, so no write meets its reads. On
        # the CPU backend the two share the cores and nothing is won.
        self.runs_ahead = decoder.signature.uses_pools and mx.default_device() == mx.gpu

    @property
    def block_manager(self) -> BlockManager:
        """Who owns which slot."""
        return self.kv_cache.block_manager

    @property
    def pools(self) -> Pools:
        """The keys and values."""
        return self.kv_cache.pools

    @property
    def max_step_tokens(self) -> int | None:
        """The most tokens of a step; None where any number goes."""
        return self.ring.max_step_tokens if self.ring else None

    @property
    def copied_slots(self) -> int:
        """How many slots were copied, of pages that rows shared and of guesses in pages of several."""
        return self.kv_cache.copied_slots

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """Lazy logits [rows, vocab] at the last real token of each row.

        tokens: int32 [rows, seq], or float embeddings [rows, seq, dim]; the first counts[r] of row r are real, the rest
        padding. A row without a real token has unspecified logits. positions: int32 [rows, seq] or [axes, rows, seq],
        by default each token's index in its row. Raises DecoderError for a row that would hold more tokens than it
        said.
        """
        decoder = self.decoder
        tokens = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
        rows, seq = tokens.shape[:2]
        new = check_new_tokens(decoder.rows, self.lengths, self.max_lengths, tokens, counts)
        if decoder.needs_equal_lengths and (self.lengths[new > 0] != self.lengths.max()).any():
            raise DecoderError(f"rows of {self.lengths.tolist()} tokens", "rows of one length where the cache grows")
        if decoder.plan.padding_side == "none" and (new[new > 0] != seq).any():
            raise DecoderError(f"counts {new.tolist()} of {seq} tokens", "no padding, which would change the states")
        placed = None if positions is None else mx.array(positions)
        if decoder.signature.uses_pools:
            return self._pooled_step(tokens, new, placed)
        self._write_pending()
        length = int(self.lengths.max())
        context = length if decoder.needs_exact_past else decoder.past_columns(length, seq)
        lengths = mx.array(np.full(rows, length, np.int32) if decoder.needs_exact_past else self.lengths)
        past = mx.array(self._block_table(max(1, context)))
        step = decoder.step_function(
            seq, StepColumns(context), positions is not None, self.kv_cache.head_span, self.paged
        )
        logits, news, states = step(
            self.pools.arrays, tokens, lengths, mx.array(new), past, self._extra_inputs_and_states(), placed
        )
        self.states = states
        places = self.lengths[:, None] + np.arange(seq, dtype=np.int32)
        places = np.where(np.arange(seq) < new[:, None], places, -1).astype(np.int32)
        self._allocate_slots(new)
        self._pending_write = (
            news,
            mx.array(places),
            mx.array(self._block_table(context_bucket(int(self.lengths.max()), rows))),
        )
        return logits

    def _pooled_step(self, tokens: mx.array, new: np.ndarray, placed: mx.array | None) -> mx.array:
        """A step of a program over pools, which writes its keys and values itself."""
        decoder, seq = self.decoder, tokens.shape[1]
        columns = self._step_columns(int((self.lengths + new).max()), seq)
        before = mx.array(self.lengths)
        self._allocate_slots(new)
        table, near = self._block_tables(columns)
        step = decoder.step_function(seq, columns, placed is not None, self.kv_cache.head_span, self.paged)
        fed = self._extra_inputs_and_states()
        logits, pools, self.states = step(self.pools.take(), tokens, before, mx.array(new), table, near, fed, placed)
        self.pools.put(pools)
        return logits

    def _extra_inputs_and_states(self) -> dict[str, mx.array]:
        """The graph's other inputs, the rows' states among them."""
        states = zip(self.decoder.signature.state_pairs, self.states, strict=True)
        return {**self.extra_inputs, **{state.past: array for state, array in states}}

    def _step_columns(self, length: int, seq: int) -> StepColumns:
        """The columns of a step of `seq` tokens to that length.

        Raises DecoderError for more tokens than a ring has slots beside the window.
        """
        ring, context = self.ring, context_bucket(length, self.decoder.rows)
        if ring is None:
            window = None if self.decoder.ring else self.decoder.max_window
            return StepColumns(context, window_context=choose_window_context(window, seq, context, self.paged))
        if length <= ring.slots:
            return StepColumns(min(context, ring.slots))
        if seq > ring.max_step_tokens:
            found = f"a step of {seq} tokens over a window of {ring.window}"
            raise DecoderError(found, f"at most {ring.max_step_tokens}", "run the prompt in parts")
        return StepColumns(ring.slots, is_ring=True)

    def _block_tables(self, columns: StepColumns) -> tuple[mx.array | None, mx.array | None]:
        """The tables of the columns, as steps take them."""
        table = mx.array(self._block_table(columns.context, ring=columns.is_ring)) if self.paged else None
        return table, mx.array(self._block_table(columns.window_context, ring=True)) if columns.window_context else None

    def _allocate_slots(self, new: np.ndarray) -> None:
        """Gives slots to the rows' new tokens."""
        self._free_unreachable_slots()
        if self.paged:
            for row, count in zip(self._sequences, new.tolist(), strict=True):
                if count:
                    assert row is not None
                    self.kv_cache.append(row, count)
        self.lengths = self.lengths + new
        self._peak_lengths = np.maximum(self._peak_lengths, self.lengths)

    def _free_unreachable_slots(self) -> None:
        """Takes the slots of tokens that no window reaches any more, unless the store keeps them for later runs."""
        if self.ring is None or not self.paged or self.has_shared_cache:
            return
        for row, length in zip(self._sequences, self.lengths.tolist(), strict=True):
            if row is not None:  # one more than the window: a ring reads its newest in place of what nobody sees
                self.block_manager.free_before(row, max(0, length - self.ring.window))

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        """Lazy logits [rows, vocab] after prompts of rows that hold nothing yet, run in one lane of `seq` tokens.

        prompts: one for each row, [] for none, whose logits are unspecified; seq: at least their sum. Raises
        DecoderError for a decoder that doesn't support it, rows that hold tokens, or prompts that are too long.
        """
        counts = np.array([len(prompt) for prompt in prompts], np.int32)
        if "packed" not in self.decoder.supports:
            found, do = "several prompts in a lane of a graph whose attention isn't over pools", "run plain steps"
            raise DecoderError(found, "one that the conversion rewrote", do)
        if len(counts) != len(self.lengths) or (self.lengths * counts).any() or (counts > self.max_lengths).any():
            found = f"prompts of {counts.tolist()} tokens for rows that hold {self.lengths.tolist()}"
            raise DecoderError(found, f"prompts of at most {self.max_lengths.tolist()} tokens, for rows that hold none")
        if self.ring and counts.max() > self.ring.max_step_tokens:
            raise DecoderError(
                f"prompts of {counts.tolist()} tokens", f"at most {self.ring.max_step_tokens} each", "run them in parts"
            )
        if not 0 < counts.sum() <= seq:
            raise DecoderError(f"{counts.sum()} tokens in a lane of {seq}", "1 or more, as many as fit")
        self._allocate_slots(counts)
        table = self._block_table(int(self.lengths.max()))  # rows of a lane before this one may hold more
        arrays = map(mx.array, steps.pack_prompts(prompts, table, seq))
        graph, span = self.decoder.graph, self.kv_cache.head_span
        step = self.decoder.compile_once(("packed", seq, span), lambda: steps.make_packed_prefill(graph, seq, span))
        logits, pools = step(self.pools.take(), *arrays)
        self.pools.put(pools)
        return logits

    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array:
        """Lazy logits [rows, n, vocab] after each of n guesses of each row, in one call; `accept` then keeps some of
        them.

        tokens: int32 [rows, n]. sees: bool [rows, n, n], whether guess i sees guess j: its ancestors and itself, for a
        tree. depths: int32 [rows, n], how many guesses come before each; -1 for padding. They take pages of their own
        beside the row's, for which its total must have room. Raises DecoderError for a
        decoder that doesn't support drafts, a run without pages, or guesses past the row's last token.
        """
        decoder = self.decoder
        if not self.paged or self._draft_sequences is not None:
            raise DecoderError("a draft in this run", "pages, and the last draft accepted", "begin(paged=True)")
        tokens, ancestor_mask = (x if isinstance(x, mx.array) else mx.array(x) for x in (tokens, ancestor_mask))
        depths = np.asarray(depths, np.int32)
        seq, span = tokens.shape[1], self.kv_cache.head_span
        last = check_draft(decoder.signature, decoder.supports, self.lengths, self.max_lengths, tokens, depths)
        # Not of what the rows hold alone: a position is at most the table's last column.
        columns = self._step_columns(int(last.max()), seq)
        self._free_unreachable_slots()
        table, near = self._block_tables(columns)
        self._draft_sequences = self.kv_cache.open_drafts((depths >= 0).sum(axis=1).tolist())
        slots = self.block_manager.table(self._draft_sequences, seq)
        places = np.where(depths >= 0, self.lengths[:, None] + depths, -1).astype(np.int32)
        key = ("draft", seq, columns, span)
        step = decoder.compile_once(key, lambda: steps.make_draft_step(decoder.graph, seq, columns, span))
        places, slots = mx.array(places), mx.array(slots)
        logits, pools = step(self.pools.take(), tokens, places, table, near, slots, ancestor_mask, self.extra_inputs)
        self.pools.put(pools)
        return logits

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Keeps the guesses `kept` of each row, a path from its first, as the row's next tokens, once the draft is
        evaluated: in the slots they have, or copied in pages of several (`copies` counts them).
        """
        if self._draft_sequences is None:
            raise DecoderError("no draft", "a draft to accept guesses of")
        self.kv_cache.accept_drafts(self._sequences, self._draft_sequences, accepted)
        self._draft_sequences = None
        self.lengths = self.lengths + np.array([len(path) for path in accepted], np.int32)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Sets each row back to its first lengths[r] tokens.

        Raises DecoderError for more than a row has, in a decoder whose states have all tokens in them, and where the
        window before a row's new end isn't there any more.
        """
        new = np.asarray(lengths, np.int32)
        if new.shape != self.lengths.shape or (new < 0).any() or (new > self.lengths).any():
            raise DecoderError(f"rows set back to {list(lengths)} tokens", f"at most {self.lengths.tolist()}")
        if self.states and (new < self.lengths).any():
            raise DecoderError("rows set back in a decoder with states", "a cache that still has what came before")
        if (
            self.ring
            and ((self._first_positions() > np.maximum(0, new - self.ring.window + 1)) & (new < self.lengths)).any()
        ):
            found = f"rows of {self.lengths.tolist()} tokens set back to {new.tolist()}"
            raise DecoderError(found, f"a window of {self.ring.window} tokens before their ends, still held")
        self._write_pending()
        for row, length in zip(self._sequences if self.paged else [], new.tolist(), strict=self.paged):
            if row is not None:
                self.block_manager.truncate(row, length)
        # In a run of slots the next tokens write over what is there; until then no position sees it.
        self.lengths = new

    def fork(self, parents: Sequence[int]) -> None:
        """From now on row r continues after the tokens of row parents[r]: the rows share slots, and nothing moves.

        In pages of several slots, the last one, partly filled, is copied when a row writes on; `copies` counts its
        slots.
        """
        if not self.paged:
            raise DecoderError(
                "a fork of rows that are one run of slots each", "pages", "begin the run with paged=True"
            )
        self._write_pending()
        left, rows = list(self._sequences), []
        for parent in parents:  # the first to follow a row takes its sequence over, so most rows only change places
            sequence, left[parent] = left[parent], None
            own = self._sequences[parent]
            rows.append(self.block_manager.fork(own) if sequence is None and own is not None else sequence)
        for sequence in left:
            if sequence is not None:
                self.block_manager.free(sequence)
        self._sequences = rows
        order = mx.array(list(parents))
        self.states = [
            mx.take(array, order, axis=state.batch_axis)
            for state, array in zip(self.decoder.signature.state_pairs, self.states, strict=True)
        ]
        self.lengths = self.lengths[list(parents)]
        self.max_lengths = np.maximum(self.max_lengths, self.max_lengths[list(parents)])

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step: `arrays` with the pools and what the step will write into them."""
        pending = self._pending_write[0] if self._pending_write else []
        self.pools.evaluate(*arrays, *pending, *self.states, wait=wait)

    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Lets later runs of the store find what the rows hold, once the steps so far are evaluated.

        texts: the tokens of each row, from its first; those that no step took yet are left out. None keeps nothing.
        """
        self._write_pending()
        self.evaluate()
        for row, text, length in zip(self._sequences, row_tokens, self.lengths.tolist(), strict=True):
            if row is not None and text is not None:
                self.block_manager.store_prefix(row, text[:length])

    def close(self) -> None:
        """The run is over. Gives the pools' memory back, unless they outlive it."""
        self._pending_write, self.states = None, []
        if self.has_shared_cache:
            self.kv_cache.close_sequences([*self._sequences, *(self._draft_sequences or ())])
            self._sequences = []
        else:
            self.pools.drop()

    def _first_positions(self) -> np.ndarray:
        """The first position of each row that is held, int32 [rows]."""
        if not self.paged:
            return np.maximum(0, self._peak_lengths - self.kv_cache.head_span)
        return np.array(
            [0 if row is None else self.block_manager.first_position(row) for row in self._sequences], np.int32
        )

    def _block_table(self, width: int, *, ring: bool = False) -> np.ndarray:
        """The slots of each row's first `width` positions, of a ring its last: int32 [rows, width], -1 for none."""
        if self.paged:
            return self.block_manager.table(self._sequences, width, ring=ring)
        places, ends = np.arange(width, dtype=np.int32), self.lengths[:, None]
        places = ends - 1 - (ends - 1 - places) % width if ring else places
        held = (places >= 0) & (places < ends) & (places < self.kv_cache.head_span)
        first = np.arange(len(ends), dtype=np.int32)[:, None] * self.kv_cache.head_span
        return np.where(held, first + places, -1).astype(np.int32)

    def _write_pending(self) -> None:
        """Writes the keys and values of the last step into the pools."""
        if self._pending_write is None:
            return
        news, places, table = self._pending_write
        self._pending_write = None
        write = self.decoder.write_function(places.shape[1], table.shape[1], self.kv_cache.head_span)
        self.pools.put(write(self.pools.take(), news, places, table))
