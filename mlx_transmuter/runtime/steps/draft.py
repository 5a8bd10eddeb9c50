"""The step of a draft: draft tokens of each row, as a tree, verified in one pass over pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.runtime.buckets import StepColumns
from mlx_transmuter.runtime.steps.graph import DecoderGraph, check_logits
from mlx_transmuter.runtime.steps.pooled import as_window_ring, ring_index, run_over_pools


class DraftStepInputs(NamedTuple):
    """pools, slot_table, window_table: see PooledStepInputs. tokens: int32 [rows, seq].

    positions: int32 [rows, seq], -1 for padding. slots: int32 [rows, seq], where the tokens are written. ancestor_mask:
    bool [rows, seq, seq], whether token i sees token j. extra_inputs: the graph's other inputs.
    """

    pools: list[mx.array]
    tokens: mx.array
    positions: mx.array
    slot_table: mx.array
    window_table: mx.array | None
    slots: mx.array
    ancestor_mask: mx.array
    extra_inputs: dict[str, mx.array]


class DraftStepOutputs(NamedTuple):
    """logits: [rows, seq, vocab] after each token. pools: after the step."""

    logits: mx.array
    pools: list[mx.array]


@dataclass(frozen=True)
class DraftStep:
    """A draft of seq tokens a row over columns of paged rows; head_span, side: as of PooledStep."""

    seq: int
    columns: StepColumns
    head_span: int
    side: int = 0

    def build(self, graph: DecoderGraph) -> Callable[[DraftStepInputs], DraftStepOutputs]:
        """Returns the function of the step."""

        def run(inputs: DraftStepInputs) -> DraftStepOutputs:
            index = CacheIndex.make(inputs.positions, inputs.slot_table)
            index = as_window_ring(graph, index) if self.columns.is_ring else index
            window_index = ring_index(graph, inputs.positions, inputs.window_table)
            outputs, pools = run_over_pools(
                graph,
                inputs.pools,
                index.draft(inputs.slots, inputs.ancestor_mask),
                self.head_span,
                window_index=window_index and window_index.draft(inputs.slots, inputs.ancestor_mask),
                tokens=inputs.tokens,
                positions=mx.maximum(inputs.positions, 0),
                logit_indices=mx.broadcast_to(shared_arange(self.seq), inputs.tokens.shape),
                extra_inputs=inputs.extra_inputs,
                side=self.side,
            )
            return DraftStepOutputs(check_logits(graph, outputs), pools)

        return run
