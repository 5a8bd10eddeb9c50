"""StepInputs: the inputs of a graph for one step, made here alone for conversion, proof, shape probe and runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.cache import CacheIndex, HybridIndex, QuantizedPool
from mlx_transmuter.cache.layout import pool_size, spare_pool_row
from mlx_transmuter.ops.indices import IntegerRange
from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.length_switches import TOTAL_LENGTH_INPUT
from mlx_transmuter.program.signature import (
    CACHE_INDEX_INPUT,
    HEAD_INDEX_INPUT,
    LOGIT_INDICES_INPUT,
    DecoderSignature,
)


@dataclass(frozen=True)
class StepInputs:
    """Makes the inputs of one step of a decoder, by name and in the dtypes that its program declares.

    max_positions: the rows of the graph's table of positions, to which positions (of padding) are clipped; None for no
    clipping. Values that the graph needs on the host are numpy arrays, all others are `mx.array`s.
    """

    signature: DecoderSignature
    declared: Mapping[str, Value]
    max_positions: int | None = None

    @staticmethod
    def from_program(
        program: Program, signature: DecoderSignature | None = None, *, max_positions: int | None = None
    ) -> StepInputs:
        """Returns the maker for a program. Raises SignatureError for a program that is no decoder."""
        signature = signature or DecoderSignature.from_program(program)
        return StepInputs(signature, {value.name: value for value in program.inputs}, max_positions)

    def feed(
        self,
        *,
        tokens: mx.array,
        positions: mx.array,
        past: Mapping[str, Any],
        past_length: int = 0,
        mask: mx.array | None = None,
        logit_indices: mx.array | None = None,
        extra_inputs: Mapping[str, mx.array] | None = None,
        side: int = 0,
    ) -> dict[str, Any]:
        """Returns the inputs of a step; those that the graph does not have are left out.

        tokens: int32 [rows, seq], or embeddings [rows, seq, dim]. positions: int32 [rows, seq] or [axes, rows, seq].
        past: what the step reads by input name (see `empty_past`, `pools`). past_length: the columns of that past.
        mask: bool [rows, columns], None for a graph that has its mask from elsewhere. logit_indices: int32 [rows, k],
        the tokens of each row whose logits are computed. extra_inputs: the graph's other inputs by name. side: of the
        graph's length switches, on which all rows that have tokens in the step are.
        """
        signature = self.signature
        feed: dict[str, Any] = {**(extra_inputs or {}), signature.token_input: tokens}
        if signature.mask_input and mask is not None:
            feed[signature.mask_input] = mask.astype(self.dtype(signature.mask_input))
        if signature.positions_input:
            rows, seq = tokens.shape[:2]
            feed[signature.positions_input] = self._fit_positions(positions, rows, seq, side)
        if signature.selects_logits and logit_indices is not None:
            feed[LOGIT_INDICES_INPUT] = logit_indices
        return {**feed, **self.host_inputs(past_length, side), **past}

    def uniform(
        self,
        *,
        tokens: mx.array,
        past_length: int,
        past: Mapping[str, Any],
        logit_indices: mx.array | None = None,
        extra_inputs: Mapping[str, mx.array] | None = None,
        side: int | None = None,
    ) -> dict[str, Any]:
        """Returns the inputs of a step whose rows all hold past_length tokens and have no padding; see `feed`.

        side: by default that of the tokens that the rows have after the step.
        """
        rows, seq = tokens.shape[:2]
        return self.feed(
            tokens=tokens,
            positions=mx.broadcast_to(mx.arange(past_length, past_length + seq, dtype=mx.int32), (rows, seq)),
            past=past,
            past_length=past_length,
            mask=mx.ones((rows, past_length + seq), mx.bool_),
            logit_indices=logit_indices,
            extra_inputs=extra_inputs,
            side=self.signature.length_switches.side(past_length + seq) if side is None else side,
        )

    def ranges(self, feed: Mapping[str, Any]) -> dict[str, IntegerRange]:
        """Returns the ranges of the integers in the inputs of a step, by input name.

        Sessions check token ids and how many tokens a row has, `feed` clips positions, and masks are made of bools.
        """
        signature = self.signature
        ranges = {LOGIT_INDICES_INPUT: IntegerRange(0, feed[signature.token_input].shape[1] - 1)}
        if not signature.takes_embeddings:
            ranges[signature.token_input] = IntegerRange(0, signature.vocab_size - 1)
        if signature.mask_input:
            ranges[signature.mask_input] = IntegerRange(0, 1)
        side = signature.length_switches.side(int(feed.get(TOTAL_LENGTH_INPUT, 0)))
        if signature.positions_input and (max_positions := self._max_positions(side)):
            ranges[signature.positions_input] = IntegerRange(0, max_positions - 1)
        return ranges

    def host_inputs(self, past_length: int, side: int = 0) -> dict[str, np.ndarray]:
        """Returns the inputs that must be known on the host: whether there is a past, that no logits are cut off, and a
        length on the side of the length switches.

        A graph that gives the logits of the last n tokens gives those of all for n = 0.
        """
        signature = self.signature
        inputs: dict[str, np.ndarray] = {}
        if signature.use_cache_branch_input:
            inputs[signature.use_cache_branch_input] = np.array([past_length > 0])
        if signature.logits_to_keep_input:
            inputs[signature.logits_to_keep_input] = np.zeros(signature.logits_to_keep_shape, np.int64)
        if signature.length_switches:
            inputs[TOTAL_LENGTH_INPUT] = signature.length_switches.total_length(side)
        return inputs

    def empty_past(self, rows: int, length: int = 0) -> dict[str, mx.array]:
        """Returns a past of `length` positions of zeros for a graph over past and present, and zero states."""
        pairs = self.signature.cache_pairs
        past = {pair.past: mx.zeros(pair.shape_for(rows, length), ops.device_dtype(pair.dtype)) for pair in pairs}
        return past | self.zero_states(rows)

    def zero_states(self, rows: int) -> dict[str, mx.array]:
        """Returns the states of rows without tokens."""
        states = self.signature.state_pairs
        return {state.past: mx.zeros(state.shape_for(rows), ops.device_dtype(state.dtype)) for state in states}

    def next_past(self, outputs: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Returns the past of the step after the one that gave these outputs, in a graph over past and present."""
        return {pair.past: outputs[pair.present] for pair in self.signature.pairs}

    def pools(
        self,
        pools: Sequence[mx.array | QuantizedPool],
        index: CacheIndex,
        head_span: int,
        *,
        window_index: CacheIndex | None = None,
    ) -> dict[str, Any]:
        """Returns the inputs of a program over pools: the pools, the index of the step's tokens, and that over heads.

        pools: one for each cache pair, [heads · slots + 1, width], the last row spare. head_span: how many slots of one
        head lie together (KVCache.head_span). window_index: the index of layers with a window, where they have one.
        """
        first = pools[0]
        pool_rows = (first.rows if isinstance(first, QuantizedPool) else first).shape[0]
        cache_index: Any = index
        head_index: Any = self.head_index(index, head_span, pool_rows)
        if window_index is not None:
            cache_index = HybridIndex(index, window_index)
            head_index = HybridIndex(head_index, self.head_index(window_index, head_span, pool_rows))
        inputs = {CACHE_INDEX_INPUT: cache_index, HEAD_INDEX_INPUT: head_index}
        return inputs | {pair.past: pool for pair, pool in zip(self.signature.cache_pairs, pools, strict=True)}

    def uncached_pools(self, rows: int, seq: int) -> dict[str, Any]:
        """Returns the pool inputs of a step over whole rows, which neither reads nor writes the pools."""
        heads = self.signature.cache_pairs[0].heads
        inputs: dict[str, Any] = {
            CACHE_INDEX_INPUT: CacheIndex.whole(rows, seq),
            HEAD_INDEX_INPUT: CacheIndex.whole(rows * heads, seq),
        }
        pairs = self.signature.cache_pairs
        return inputs | {p.past: mx.zeros((p.heads, p.head_dim), ops.device_dtype(p.dtype)) for p in pairs}

    def zero_pools(self, rows: int, past_length: int, seq: int) -> dict[str, Any]:
        """Returns pools of zeros, past_length + seq slots for each row, and the index of its last seq tokens."""
        slots = past_length + seq
        positions = mx.broadcast_to(mx.arange(past_length, slots, dtype=mx.int32), (rows, seq))
        index = CacheIndex.rows(slots, [0] * rows).with_positions(positions)
        pairs = self.signature.cache_pairs
        shapes = [(pool_size(rows * slots, pair.heads), pair.head_dim) for pair in pairs]
        zeros = [mx.zeros(shape, ops.device_dtype(pair.dtype)) for shape, pair in zip(shapes, pairs, strict=True)]
        return self.pools(zeros, index, slots)

    def zero_tokens(self, rows: int, seq: int) -> mx.array:
        """Returns tokens of id 0 [rows, seq], or embeddings of zeros [rows, seq, dim], in the declared dtype."""
        name = self.signature.token_input
        shape = self.declared[name].shape or ()
        width = shape[-1] if self.signature.takes_embeddings and shape else None
        return mx.zeros((rows, seq, width) if isinstance(width, int) else (rows, seq), self.dtype(name))

    def head_index(self, index: CacheIndex, head_span: int, pool_rows: int) -> CacheIndex:
        """Returns the index over pools that keep heads apart, of pool_rows rows, the last one spare.

        A pool of keys and values has the keys of all heads before the values; see CacheIndex.for_heads.
        """
        heads = self.signature.cache_pairs[0].heads
        if not self.signature.fused_kv_pools:
            return index.for_heads(heads, head_span).with_spare_pool_row(spare_pool_row(pool_rows))
        half = index.for_heads(heads // 2, head_span)
        return half.for_key_value_pool((pool_rows - 1) // 2).with_spare_pool_row(spare_pool_row(pool_rows))

    def dtype(self, name: str) -> mx.Dtype:
        """Returns the MLX dtype of an input that the program declares."""
        return ops.device_dtype(self.declared[name].dtype)

    def _max_positions(self, side: int) -> int | None:
        """Returns the most tokens of a row on a side of the length switches; None without a limit."""
        limits = (self.max_positions, self.signature.length_switches.max_length(side))
        return min((limit for limit in limits if limit), default=None)

    def _fit_positions(self, positions: mx.array, rows: int, seq: int, side: int) -> mx.array:
        """Returns positions [rows, seq], or [axes, rows, seq], as the graph's position_ids.

        Only padding is at positions past the limit of its side.
        """
        if max_positions := self._max_positions(side):
            positions = mx.clip(positions, 0, max_positions - 1)
        axes = self.signature.position_axes
        return mx.broadcast_to(positions, (axes, rows, seq)) if axes and positions.ndim == 2 else positions
