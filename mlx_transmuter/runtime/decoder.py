"""The Decoder: how a module runs as a decoder, and its step functions, compiled once for each shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import KVCache, PoolSpec
from mlx_transmuter.ops.compiled_function import CompiledFunction
from mlx_transmuter.program.attention_nodes import attention_windows
from mlx_transmuter.program.expert_stacks import check_expert_stacks
from mlx_transmuter.program.length_switches import LengthSwitches
from mlx_transmuter.program.metadata import Metadata
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import CacheMode, DecoderSignature
from mlx_transmuter.program.token_tables import check_token_tables
from mlx_transmuter.runtime.buckets import Ring, context_bucket
from mlx_transmuter.runtime.cache_session import CacheSession
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.full_context_session import FullContextSession
from mlx_transmuter.runtime.length_switch_session import LengthSwitchSession
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.row_slots import RowSlots
from mlx_transmuter.runtime.step_inputs import StepInputs
from mlx_transmuter.runtime.steps.graph import DecoderGraph, Step

# The most tokens of a row for which a session takes memory at its beginning, in a decoder without a trained length.
MAX_RESERVED_TOKENS = 8192


class Decoder:
    """A module as a decoder of batches of `rows` rows.

    cache_mode: by default that of the plan. plan: how it runs, by default as the conversion recorded. kv_bits: 8 or 4,
    to keep keys and values in so many bits an element, in groups of kv_group_size (see cache.QuantizedFormat); None
    keeps them as they are. fixed_side: the side of the length switches on which rows of any length are, for proofs.
    position_limit: where the first of the graph's tables of positions ends, and with it every row; None where none
    does. trained_length: the tokens of a row that the model was trained for, where that is known. Raises SignatureError
    for a module that is no decoder, or one with a table that has no row for some token; ProgramError for fewer
    experts than its router chooses among, CacheError for other bits or groups.
    """

    def __init__(
        self,
        module: ProgramModule,
        rows: int,
        *,
        cache_mode: CacheMode | None = None,
        plan: RunPlan | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        fixed_side: int | None = None,
    ):
        if rows < 1:
            raise DecoderError(f"{rows} rows", "at least one row")
        self.module, self.rows = module, rows
        program = module.program
        self.signature = DecoderSignature.from_program(program)
        check_token_tables(program, self.signature)
        check_expert_stacks(program)
        self.plan = plan or RunPlan.from_program(program, self.signature)
        self.cache_mode: CacheMode = cache_mode or self.plan.cache_mode
        self.position_limit = module.position_limit
        self.trained_length = Metadata(program.metadata).trained_length
        if kv_bits is not None and not self.signature.cache_pairs:
            raise DecoderError(f"kv_bits={kv_bits}", "None: this decoder has no keys and values", "leave out kv_bits")
        self.pool_specs = tuple(
            PoolSpec.for_vectors(pair.heads, pair.head_dim, ops.device_dtype(pair.dtype), kv_bits, kv_group_size)
            for pair in self.signature.cache_pairs
        )
        windows = attention_windows(program) if self.signature.uses_pools else ()
        self.max_window = max(windows, default=0) or None
        self.ring = Ring.for_window(max(windows)) if windows and min(windows) else None
        step_inputs = StepInputs.from_program(program, self.signature, max_positions=self.max_positions)
        self.graph = DecoderGraph(module, step_inputs, self.pool_specs, self.plan.row_by_row, self.max_window)
        self.vocab_size = self.signature.vocab_size
        self._fixed_side = fixed_side
        self._compiled_steps: dict[Step, Callable[[Any], Any]] = {}
        mx.eval(module.parameters())  # a captured weight that was never evaluated would be computed anew at each call

    @property
    def max_positions(self) -> int | None:
        """The most tokens of a row; None without a limit."""
        return self.position_limit.tokens if self.position_limit else None

    @property
    def supports_drafts(self) -> bool:
        """Whether a session can check drafts.

        That needs a graph whose attention is over pools, that gives logits of any token, and that takes rows of several
        tokens at any time. In another graph the order of the columns is the order of the tokens, and a state has all
        tokens in it, rejected ones too.
        """
        plain = self.plan == RunPlan(self.plan.cache_mode) and not self.signature.state_pairs
        return plain and self.signature.uses_pools and self.signature.selects_logits

    @property
    def supports_packed_prefill(self) -> bool:
        """Whether a session can run several prompts in one row, which has no row of the graph's other inputs."""
        return self.supports_drafts and not self.signature.extra_inputs

    @property
    def needs_equal_lengths(self) -> bool:
        """Whether the rows of a session must have one length: the graph takes its positions from it, or no padding may
        be in a step.
        """
        return self.needs_exact_past or self.plan.padding_side == "none"

    @property
    def needs_exact_past(self) -> bool:
        """Whether the graph gets a past, or a mask, of exactly the tokens so far: positions come from its length."""
        has_length = bool(self.signature.cache_pairs or (self.signature.state_pairs and self.signature.mask_input))
        return self.cache_mode == "grow" and not self.signature.uses_pools and has_length

    def sides_of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the sides int32 [rows] of the length switches on which rows of int32 [rows] tokens are."""
        if self._fixed_side is not None:
            return np.full_like(lengths, self._fixed_side)
        return self.signature.length_switches.sides_of(lengths)

    def next_switch(self, length: int) -> int:
        """Returns the most tokens that a row of `length` tokens can have before it passes a length switch."""
        switches = self.signature.length_switches if self._fixed_side is None else LengthSwitches()
        return switches.next_switch(length)

    @property
    def prompt_mode(self) -> str:
        """How prompts run (see RunPlan): in "chunks" of powers of two, "whole", or "token by token"."""
        return self.plan.prompt_mode

    @property
    def pads_last_chunk(self) -> bool:
        """Whether the last tokens of a prompt run in one step with padding: on a GPU, where a step of few tokens takes
        as long as reading the weights does. A graph with states takes no padding at the end of a prompt.
        """
        return mx.default_device() != mx.cpu and self.supports_drafts

    @property
    def compilations(self) -> int:
        """How many steps were compiled."""
        return len(self._compiled_steps)

    def group_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Returns the rows that may share a session, by their prompts' lengths; rows of length 0 are in none.

        All rows share one session, except where `needs_equal_lengths`.
        """
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            if length:
                groups.setdefault(length if self.needs_equal_lengths else 0, []).append(row)
        return list(groups.values())

    def past_columns(self, length: int, seq: int) -> int:
        """Returns the columns of the cache that a step of seq tokens after `length` reads where the graph gets a
        buffer.

        A graph with tables of positions or masks has no rows for more than max_positions columns, the step's included.
        """
        if self.cache_mode == "in_place":
            return self._bucket_within_limits(length + seq)
        return self._bucket_within_limits(length, seq)

    def full_context_columns(self, length: int) -> int:
        """Returns the columns of a step that reads all tokens of rows of up to `length` tokens."""
        return self._bucket_within_limits(length)

    def _bucket_within_limits(self, length: int, seq: int = 0) -> int:
        """Returns the context bucket of `length` columns, cut so that with seq more it stays below max_positions.

        So does that of a row below the trained length, where tables may end that the walk over the graph cannot know.
        """
        bucket = context_bucket(length, self.rows)
        if self.max_positions:
            bucket = min(bucket, max(length, self.max_positions - seq))
        if self.trained_length and length <= self.trained_length - seq:
            bucket = min(bucket, self.trained_length - seq)
        return bucket

    def begin_session(
        self,
        max_lengths: Sequence[int],
        extra_inputs: Mapping[str, mx.array] | None = None,
        *,
        paged: bool = False,
        block_size: int = 1,
        kv_cache: KVCache | None = None,
        prompts: Sequence[Sequence[int]] = (),
        forked_lengths: Sequence[int] = (),
    ) -> CacheSession | FullContextSession:
        """Returns a session whose rows have no tokens, or those that are in kv_cache already.

        max_lengths: the most tokens that each row will have, 0 for a padding row. extra_inputs: arrays of the graph's
        other inputs (an encoder's outputs), one row for each row. paged: slots are handed out in blocks of block_size,
        so that rows can fork; else each row has contiguous slots. kv_cache: pools of the decoder's pool_specs that
        outlive the session, which then has their block size: each row begins with the most first tokens of its prompt,
        of `prompts`, that they hold, as `Session.lengths` says; never with all of them. forked_lengths: how many first
        tokens of each row it will have by a fork from another row that stays as long, which then need no slots of their
        own; by default none. Raises DecoderError for a wrong number of rows, other inputs, or other pools; CacheError
        for prompts that the cache has no room for.
        """
        if len(max_lengths) != self.rows:
            raise DecoderError(f"{len(max_lengths)} rows", f"{self.rows}")
        inputs = dict(extra_inputs or {})
        if inputs.keys() != set(self.signature.extra_inputs):
            raise DecoderError(f"the inputs {sorted(inputs)}", f"the graph's {sorted(self.signature.extra_inputs)}")
        if not self.signature.pairs:
            return FullContextSession(self, max_lengths, inputs)
        # Rows that outgrow the ring keep the tokens in the window alone.
        ring = self.ring if self.ring and int(max(max_lengths)) > self.ring.slots else None
        if kv_cache is None:
            reserved, forked = self._reserved_lengths(max_lengths), self._reserved_lengths(forked_lengths)
            slots = RowSlots.allocate(self.pool_specs, reserved, ring, block_size if paged else None, forked)
            session_type = LengthSwitchSession if self.signature.length_switches else CacheSession
            return session_type(self, max_lengths, inputs, slots)
        if inputs or kv_cache.pool_specs != self.pool_specs or len(prompts) != self.rows:
            found = f"pools of {kv_cache.pool_specs}, the inputs {sorted(inputs)} and {len(prompts)} prompts"
            expected = f"pools of {self.pool_specs}, no inputs but tokens and {self.rows} prompts"
            raise DecoderError(found, expected, "give a cache of this decoder's pools, and a decoder of tokens alone")
        sides = self.sides_of(np.array([len(prompt) for prompt in prompts], np.int32))
        sequences, stored = kv_cache.open_sequences(
            prompts, max_lengths, equal_prefixes=self.needs_equal_lengths, roots=sides.tolist()
        )
        try:
            slots = RowSlots(kv_cache, sequences, ring, paged=True, is_shared=True)
            if self.signature.length_switches:
                return LengthSwitchSession(self, max_lengths, inputs, slots, stored, prompts)
            return CacheSession(self, max_lengths, inputs, slots, stored)
        except BaseException:  # no memory, Ctrl-C
            kv_cache.close_sequences(sequences)
            raise

    def _reserved_lengths(self, max_lengths: Sequence[int]) -> list[int]:
        """Returns for how many tokens of each row a session takes memory when it begins: no more than models are made
        for, however many there may be."""
        return [min(int(length), self.trained_length or MAX_RESERVED_TOKENS) for length in max_lengths]

    def compile_once(self, step: Step) -> Callable[[Any], Any]:
        """Returns the function of a step, built at its first use and compiled, where the module can be."""
        if step not in self._compiled_steps:
            function = step.build(self.graph)
            self._compiled_steps[step] = CompiledFunction(function) if self.module.is_compilable else function
        return self._compiled_steps[step]
