"""The graph that steps run, and what all steps do with it: call it, check and choose its logits, update its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache import PoolSpec
from mlx_transmuter.cache.layout import shared_arange
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.step_inputs import StepInputs


@dataclass(frozen=True)
class DecoderGraph:
    """What a step runs.

    step_inputs: makes the module's inputs. pool_specs: what a slot of each pool holds. row_by_row: whether the graph
    takes one row. max_window: the largest window of its attention; None where it has none.
    """

    module: ProgramModule
    step_inputs: StepInputs
    pool_specs: tuple[PoolSpec, ...]
    row_by_row: bool = False
    max_window: int | None = None

    @property
    def signature(self) -> DecoderSignature:
        """The signature of the module's program."""
        return self.step_inputs.signature


class Step(Protocol):
    """A kind of step with its shapes, hashable: the key of its compiled function."""

    def build(self, graph: DecoderGraph) -> Callable[[Any], Any]:
        """Returns the function of the step's inputs that runs the graph."""
        ...


def call_graph(graph: DecoderGraph, feed: Mapping[str, Any], rows: int) -> dict[str, mx.array]:
    """Returns the graph's outputs; a graph that takes one row runs once a row, and the outputs are concatenated."""
    if not graph.row_by_row:
        return run_module(graph, feed)
    signature = graph.signature
    input_axes = {pair.past: pair.batch_axis for pair in signature.pairs} | {signature.positions_input: -2}
    output_axes = {pair.present: pair.batch_axis for pair in signature.pairs} | {signature.logits_output: 0}

    def row_of(name: str, value: Any, row: int) -> Any:
        # What is no mx.array is known on the host and the same for all rows.
        return mx.take(value, mx.array([row]), input_axes.get(name, 0)) if isinstance(value, mx.array) else value

    row_feeds = [{name: row_of(name, value, row) for name, value in feed.items()} for row in range(rows)]
    outputs = [run_module(graph, row_feed) for row_feed in row_feeds]
    return {name: mx.concatenate([row[name] for row in outputs], axis=axis) for name, axis in output_axes.items()}


def run_module(graph: DecoderGraph, feed: Mapping[str, Any]) -> dict[str, mx.array]:
    """Returns the module's outputs for the inputs of a step."""
    return graph.module.call_with_ranges(feed, graph.step_inputs.ranges(feed))


def check_logits(graph: DecoderGraph, outputs: Mapping[str, mx.array]) -> mx.array:
    """Returns the logits [rows, tokens, vocab]. Raises DecoderError where they are not as the graph declares."""
    logits = outputs[graph.signature.logits_output]
    if logits.ndim != 3 or logits.shape[2] != graph.signature.vocab_size:
        expected = f"[rows, tokens, {graph.signature.vocab_size}], as declared"
        raise DecoderError(f"logits of shape {list(logits.shape)}", expected)
    return logits


def gather_logits(logits: mx.array, logit_indices: mx.array) -> mx.array:
    """Returns logits [rows, seq, vocab] at one token of each row, logit_indices int32 [rows], as [rows, vocab].

    A graph may give the logits of its last token alone.
    """
    logit_indices = mx.minimum(logit_indices, logits.shape[1] - 1)
    indices = mx.broadcast_to(logit_indices[:, None, None], (logits.shape[0], 1, logits.shape[2]))
    return mx.take_along_axis(logits, indices, axis=1)[:, 0]


def row_positions(lengths: Any, seq: int) -> Any:
    """Returns the positions int32 [rows, seq] of seq tokens after rows of lengths int32 [rows]; numpy or MLX alike."""
    return lengths[:, None] + _arange_like(lengths, seq)


def is_token(counts: Any, seq: int) -> Any:
    """Returns bool [rows, seq]: the first counts[r] of row r are tokens, the rest is padding; numpy or MLX alike."""
    return _arange_like(counts, seq) < counts[:, None]


def _arange_like(numbers: Any, count: int) -> Any:
    return np.arange(count, dtype=np.int32) if isinstance(numbers, np.ndarray) else shared_arange(count)


def last_token_indices(counts: mx.array) -> mx.array:
    """Returns the index int32 [rows] of the last token of each row, 0 for a row of padding."""
    return mx.maximum(counts - 1, 0)


def updated_states(
    graph: DecoderGraph, states: Mapping[str, mx.array], outputs: Mapping[str, mx.array], counts: mx.array
) -> list[mx.array]:
    """Returns the new states of the rows that had tokens, and the old ones (by input name) of the others."""
    updated = []
    for pair in graph.signature.state_pairs:
        old, new = states[pair.past], outputs[pair.present]
        shape = [1] * new.ndim
        shape[pair.batch_axis] = -1
        updated.append(mx.where((counts > 0).reshape(shape), new.astype(old.dtype), old))
    return updated
