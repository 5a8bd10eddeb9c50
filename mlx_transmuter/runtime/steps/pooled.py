"""The step of a program over pools, which reads and writes its keys and values by an index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache import CacheIndex, QuantizedPool
from mlx_transmuter.runtime.buckets import StepColumns
from mlx_transmuter.runtime.steps.graph import (
    DecoderGraph,
    check_logits,
    gather_logits,
    last_token_indices,
    row_positions,
    run_module,
    updated_states,
)


class PooledStepInputs(NamedTuple):
    """pools: taken from their owner, one a cache pair. tokens: int32 [rows, seq], or embeddings [rows, seq, dim].

    lengths, counts: int32 [rows], the tokens of each row before the step, and those in it. token_positions: int32
    [rows, seq], -1 for padding. slot_table: int32 [rows, context], that of a ring where the columns are one; None where
    each row has contiguous slots. window_table: the ring of the layers with a window, None where they read as the
    others do. extra_inputs_and_states: the graph's other inputs, and its states before the step. positions: int32
    [rows, seq] or [axes, rows, seq]; None for those that follow from the lengths.
    """

    pools: list[mx.array]
    tokens: mx.array
    lengths: mx.array
    counts: mx.array
    token_positions: mx.array
    slot_table: mx.array | None
    window_table: mx.array | None
    extra_inputs_and_states: dict[str, mx.array]
    positions: mx.array | None


class PooledStepOutputs(NamedTuple):
    """logits: [rows, vocab] at the last token of each row. pools, states: after the step."""

    logits: mx.array
    pools: list[mx.array]
    states: list[mx.array]


@dataclass(frozen=True)
class PooledStep:
    """A step of seq tokens over columns of pools in which head_span slots of one head lie together.

    paged: whether rows have a slot table. side: see StepInputs.feed.
    """

    seq: int
    columns: StepColumns
    head_span: int
    paged: bool
    has_positions: bool
    side: int = 0

    def build(self, graph: DecoderGraph) -> Callable[[PooledStepInputs], PooledStepOutputs]:
        """Returns the function of the step."""

        def run(inputs: PooledStepInputs) -> PooledStepOutputs:
            default_positions = row_positions(inputs.lengths, self.seq)
            last = last_token_indices(inputs.counts)
            outputs, pools = run_over_pools(
                graph,
                inputs.pools,
                self._index(graph, inputs),
                self.head_span,
                window_index=ring_index(graph, inputs.token_positions, inputs.window_table),
                tokens=inputs.tokens,
                positions=default_positions if inputs.positions is None else inputs.positions,
                logit_indices=last[:, None],
                extra_inputs=inputs.extra_inputs_and_states,
                side=self.side,
            )
            logits = check_logits(graph, outputs)
            logits = logits[:, 0] if graph.signature.selects_logits else gather_logits(logits, last)
            return PooledStepOutputs(
                logits, pools, updated_states(graph, inputs.extra_inputs_and_states, outputs, inputs.counts)
            )

        return run

    def _index(self, graph: DecoderGraph, inputs: PooledStepInputs) -> CacheIndex:
        if self.paged:
            index = CacheIndex.make(inputs.token_positions, inputs.slot_table)
        else:
            runs = CacheIndex.rows(self.head_span, [0] * inputs.tokens.shape[0])
            runs = runs if self.columns.is_ring else runs.limit_context(self.columns.context)
            index = runs.with_positions(inputs.token_positions)
        return as_window_ring(graph, index) if self.columns.is_ring else index


def run_over_pools(
    graph: DecoderGraph,
    pools: list[mx.array],
    index: CacheIndex,
    head_span: int,
    *,
    window_index: CacheIndex | None = None,
    tokens: mx.array,
    positions: mx.array,
    logit_indices: mx.array,
    extra_inputs: dict[str, mx.array],
    side: int,
) -> tuple[dict[str, mx.array], list[mx.array]]:
    """Returns the outputs of the program over pools, and the new pools; see StepInputs.feed and StepInputs.pools."""
    step_inputs = graph.step_inputs
    layer_pools = [spec.as_pool(pool) for spec, pool in zip(graph.pool_specs, pools, strict=True)]
    feed = step_inputs.feed(
        tokens=tokens,
        positions=positions,
        past=step_inputs.pools(layer_pools, index, head_span, window_index=window_index),
        logit_indices=logit_indices,
        extra_inputs=extra_inputs,
        side=side,
    )
    outputs = run_module(graph, feed)
    presents = [outputs[pair.present] for pair in graph.signature.cache_pairs]
    return outputs, [pool.rows if isinstance(pool, QuantizedPool) else pool for pool in presents]


def as_window_ring(graph: DecoderGraph, index: CacheIndex) -> CacheIndex:
    """Returns the index with its columns as a ring that shows the graph's largest window."""
    assert graph.max_window is not None
    return index.as_ring().window(graph.max_window)


def ring_index(graph: DecoderGraph, token_positions: mx.array, table: mx.array | None) -> CacheIndex | None:
    """Returns the index over the table of a ring; None without a table."""
    return None if table is None else as_window_ring(graph, CacheIndex.make(token_positions, table))
