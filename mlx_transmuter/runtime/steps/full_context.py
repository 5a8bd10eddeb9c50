"""The step of a decoder without a cache, over all tokens of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.program.run_plan import PaddingSide
from mlx_transmuter.runtime.steps.graph import DecoderGraph, call_graph, check_logits, gather_logits


class FullContextInputs(NamedTuple):
    """tokens: int32 [rows, columns], or embeddings [rows, columns, dim], padded on the plan's side.

    lengths: int32 [rows], the tokens of each row. positions: int32 [rows, columns] or [axes, rows, columns]; None for
    the tokens' indices. extra_inputs: the graph's other inputs.
    """

    tokens: mx.array
    lengths: mx.array
    positions: mx.array | None
    extra_inputs: dict[str, mx.array]


@dataclass(frozen=True)
class FullContextStep:
    """A step over `columns` columns; side: as of PooledStep."""

    columns: int
    padding_side: PaddingSide
    has_positions: bool
    side: int = 0

    def build(self, graph: DecoderGraph) -> Callable[[FullContextInputs], mx.array]:
        """Returns the function that returns the logits [rows, vocab] at the last token of each row."""

        def run(inputs: FullContextInputs) -> mx.array:
            rows, columns, padded_left = inputs.tokens.shape[0], self.columns, self.padding_side == "left"
            lengths = mx.maximum(inputs.lengths, 1)[:, None]  # a row of padding sees a token: its softmax needs one
            numbers = mx.broadcast_to(shared_arange(columns), (rows, columns))
            token_indices = numbers - (columns - lengths) if padded_left else numbers
            mask = (token_indices >= 0) & (token_indices < lengths)
            positions = mx.maximum(token_indices, 0) if inputs.positions is None else inputs.positions
            last = mx.full((rows,), columns - 1, mx.int32) if padded_left else lengths[:, 0] - 1
            feed = graph.step_inputs.feed(
                tokens=inputs.tokens,
                positions=positions,
                past={},
                mask=mask,
                logit_indices=last[:, None],
                extra_inputs=inputs.extra_inputs,
                side=self.side,
            )
            return gather_logits(check_logits(graph, call_graph(graph, feed, rows)), last)

        return run
