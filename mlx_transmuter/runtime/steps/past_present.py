"""The step of a graph over past and present: its past is read from the pools as the graph's cache mode wants it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache import CacheIndex, PoolSpec
from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.program.cache_pairs import CachePair
from mlx_transmuter.program.signature import CacheMode
from mlx_transmuter.runtime.steps.graph import (
    DecoderGraph,
    call_graph,
    check_logits,
    gather_logits,
    is_token,
    last_token_indices,
    row_positions,
    updated_states,
)


class PastPresentInputs(NamedTuple):
    """pools: to read. tokens, lengths, counts, extra_inputs_and_states, positions: see PooledStepInputs.

    slot_table: int32 [rows, context], or [rows, 1] for an empty context.
    """

    pools: list[mx.array]
    tokens: mx.array
    lengths: mx.array
    counts: mx.array
    slot_table: mx.array
    extra_inputs_and_states: dict[str, mx.array]
    positions: mx.array | None


class PastPresentOutputs(NamedTuple):
    """logits: [rows, vocab] at the last token of each row. states: after the step.

    new_vectors: the keys and values of the step's tokens, [rows · heads, seq, head_dim] for each cache pair.
    """

    logits: mx.array
    new_vectors: list[mx.array]
    states: list[mx.array]


@dataclass(frozen=True)
class PastPresentStep:
    """A step of seq tokens over a past of `context` columns; head_span, side: as of PooledStep."""

    cache_mode: CacheMode
    seq: int
    context: int
    head_span: int
    has_positions: bool
    side: int = 0

    def build(self, graph: DecoderGraph) -> Callable[[PastPresentInputs], PastPresentOutputs]:
        """Returns the function of the step."""
        cache_pairs = graph.signature.cache_pairs
        past_form = _PAST_FORMS[self.cache_mode](graph, self)

        def run(inputs: PastPresentInputs) -> PastPresentOutputs:
            rows = inputs.tokens.shape[0]
            past, mask = past_form.read(inputs)
            positions = row_positions(inputs.lengths, self.seq) if inputs.positions is None else inputs.positions
            last = last_token_indices(inputs.counts)
            feed = graph.step_inputs.feed(
                tokens=inputs.tokens,
                positions=positions,
                past={pair.past: array for pair, array in zip(cache_pairs, past, strict=True)},
                past_length=self.context,
                mask=mask,
                logit_indices=last[:, None],
                extra_inputs=inputs.extra_inputs_and_states,
                side=self.side,
            )
            outputs = call_graph(graph, feed, rows)
            logits = gather_logits(check_logits(graph, outputs), last)
            presents = [
                outputs[pair.present].transpose(pair.axis_order).reshape(rows * pair.heads, -1, pair.head_dim)
                for pair in cache_pairs
            ]
            new_vectors = [
                past_form.select_new_vectors(present, pair, inputs.lengths)
                for present, pair in zip(presents, cache_pairs, strict=True)
            ]
            return PastPresentOutputs(
                logits, new_vectors, updated_states(graph, inputs.extra_inputs_and_states, outputs, inputs.counts)
            )

        return run


class _PastForm(ABC):
    """The form in which a graph takes its past and returns its present."""

    def __init__(self, graph: DecoderGraph, step: PastPresentStep):
        self.graph, self.step = graph, step

    @abstractmethod
    def read(self, inputs: PastPresentInputs) -> tuple[list[mx.array], mx.array]:
        """Returns the past of each cache pair, and the mask bool [rows, columns]."""

    def select_new_vectors(self, present: mx.array, pair: CachePair, lengths: mx.array) -> mx.array:
        """Returns the step's own vectors of a present [rows · heads, columns, head_dim]."""
        return present[:, self.step.context :]

    def read_pools(self, inputs: PastPresentInputs, index: CacheIndex, *, selected: bool = False) -> list[mx.array]:
        """Returns what the index reads of each pool, in the shape of the graph's past.

        selected: whether the index selects columns, for one token a row.
        """
        signature, specs = self.graph.signature, self.graph.pool_specs
        return [
            self._read_pool(pool, spec, pair, index, selected)
            for pool, spec, pair in zip(inputs.pools, specs, signature.cache_pairs, strict=True)
        ]

    def _read_pool(
        self, pool: mx.array, spec: PoolSpec, pair: CachePair, index: CacheIndex, selected: bool
    ) -> mx.array:
        vectors = spec.decode(index.for_heads(pair.heads, self.step.head_span).read(pool))
        vectors = vectors[:, 0] if selected else vectors
        order, sizes = pair.axis_order, pair.shape_for(vectors.shape[0] // pair.heads, vectors.shape[1])
        axes = [order.index(axis) for axis in range(len(order))]
        return vectors.reshape([sizes[axis] for axis in order]).transpose(axes)


class _AppendedPast(_PastForm):
    """The past is a buffer with its free columns first, hidden by the mask; the new columns come back after it.

    The last column of the buffer is the newest position: exporters measure a window as a distance between columns.
    """

    def read(self, inputs: PastPresentInputs) -> tuple[list[mx.array], mx.array]:
        context, lengths = self.step.context, inputs.lengths
        columns = lengths[:, None] - context + shared_arange(context)
        index = CacheIndex.make(lengths[:, None] - 1, inputs.slot_table).select(columns[:, None])
        mask = mx.concatenate([columns >= 0, is_token(inputs.counts, self.step.seq)], axis=1)
        return self.read_pools(inputs, index, selected=True), mask


class _InPlacePast(_PastForm):
    """The past is a buffer into which the graph writes, after as many rows as the mask counts, padding included."""

    def read(self, inputs: PastPresentInputs) -> tuple[list[mx.array], mx.array]:
        index = CacheIndex.make(inputs.lengths[:, None] - 1, inputs.slot_table)
        mask = shared_arange(self.step.context) < inputs.lengths[:, None] + self.step.seq
        return self.read_pools(inputs, index), mask

    def select_new_vectors(self, present: mx.array, pair: CachePair, lengths: mx.array) -> mx.array:
        positions = mx.repeat(row_positions(lengths, self.step.seq), pair.heads, axis=0)[:, :, None]
        indices = mx.broadcast_to(positions, (*positions.shape[:2], pair.head_dim))
        return mx.take_along_axis(present, indices, axis=1)


class _GrowingPast(_PastForm):
    """The past has its exact length, the same for all rows: the graph takes the positions from it."""

    def read(self, inputs: PastPresentInputs) -> tuple[list[mx.array], mx.array]:
        rows, context = inputs.slot_table.shape[0], self.step.context
        if context:
            past = self.read_pools(inputs, CacheIndex.make(inputs.lengths[:, None] - 1, inputs.slot_table))
        else:
            empty = self.graph.step_inputs.empty_past(rows)
            past = [empty[pair.past] for pair in self.graph.signature.cache_pairs]
        return past, mx.ones((rows, context + self.step.seq), mx.bool_)


_PAST_FORMS: dict[CacheMode, type[_PastForm]] = {
    "append": _AppendedPast,
    "in_place": _InPlacePast,
    "grow": _GrowingPast,
}
