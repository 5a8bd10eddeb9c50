"""The step of a packed prefill: several prompts, one after another in one row, over pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import CacheIndex
from mlx_transmuter.runtime.steps.graph import DecoderGraph, check_logits
from mlx_transmuter.runtime.steps.pooled import run_over_pools


class PackedPrefillInputs(NamedTuple):
    """pools: taken from their owner. tokens, positions (-1 for padding), slots: int32 [1, seq].

    logit_indices: int32 [1, prompts], the index of each prompt's last token; 0 for an empty prompt.
    """

    pools: list[mx.array]
    tokens: mx.array
    positions: mx.array
    slots: mx.array
    logit_indices: mx.array

    @staticmethod
    def pack(
        pools: list[mx.array], prompts: Sequence[Sequence[int]], slot_table: np.ndarray, seq: int
    ) -> PackedPrefillInputs:
        """Returns the inputs of prompts in one row of seq tokens; slot_table [prompts, ...] has their slots.

        The padding is the first token again, so that it brings no value that is not a prompt's.
        """
        tokens = np.full((1, seq), next(prompt[0] for prompt in prompts if prompt), np.int32)
        positions, slots = np.full((2, 1, seq), -1, np.int32)
        logit_indices = np.zeros((1, len(prompts)), np.int32)
        start = 0
        for row, prompt in enumerate(prompts):
            if count := len(prompt):
                span = slice(start, start + count)
                tokens[0, span], positions[0, span], slots[0, span] = prompt, range(count), slot_table[row, :count]
                start += count
                logit_indices[0, row] = start - 1
        return PackedPrefillInputs(pools, *map(mx.array, (tokens, positions, slots, logit_indices)))


class PackedPrefillOutputs(NamedTuple):
    """logits: [prompts, vocab] after each prompt. pools: after the step."""

    logits: mx.array
    pools: list[mx.array]


@dataclass(frozen=True)
class PackedPrefillStep:
    """A packed prefill of seq tokens; head_span, side: as of PooledStep."""

    seq: int
    head_span: int
    side: int = 0

    def build(self, graph: DecoderGraph) -> Callable[[PackedPrefillInputs], PackedPrefillOutputs]:
        """Returns the function of the step."""
        signature, _ = CacheIndex.packed(self.seq, [[self.seq]]).walk()

        def run(inputs: PackedPrefillInputs) -> PackedPrefillOutputs:
            outputs, pools = run_over_pools(
                graph,
                inputs.pools,
                CacheIndex.from_walk(signature, [inputs.positions]).write_at(inputs.slots),
                self.head_span,
                tokens=inputs.tokens,
                positions=mx.maximum(inputs.positions, 0),
                logit_indices=inputs.logit_indices,
                extra_inputs={},
                side=self.side,
            )
            return PackedPrefillOutputs(check_logits(graph, outputs)[0], pools)

        return run
