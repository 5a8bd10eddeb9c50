"""The step that writes the keys and values of a past-and-present step into the pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.cache.layout import spare_pool_row
from mlx_transmuter.runtime.steps.graph import DecoderGraph


class PoolWriteInputs(NamedTuple):
    """pools: taken from their owner. new_vectors: [rows · heads, seq, head_dim] for each pool.

    positions: int32 [rows, seq], -1 for padding. slot_table: int32 [rows, context].
    """

    pools: list[mx.array]
    new_vectors: list[mx.array]
    positions: mx.array
    slot_table: mx.array


@dataclass(frozen=True)
class PoolWriteStep:
    """A write of seq tokens a row over a table of `context` columns; head_span: as of PooledStep."""

    seq: int
    context: int
    head_span: int

    def build(self, graph: DecoderGraph) -> Callable[[PoolWriteInputs], list[mx.array]]:
        """Returns the function that returns the pools with the vectors in them."""

        def run(inputs: PoolWriteInputs) -> list[mx.array]:
            index = CacheIndex.make(inputs.positions, inputs.slot_table)
            return [
                index.for_heads(spec.heads, self.head_span)
                .with_spare_pool_row(spare_pool_row(pool.shape[0]))
                .write(spec.encode(vectors), pool)
                for pool, vectors, spec in zip(inputs.pools, inputs.new_vectors, graph.pool_specs, strict=True)
            ]

        return run
