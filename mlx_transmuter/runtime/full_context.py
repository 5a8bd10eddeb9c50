"""Rereading: a run of a decoder without a cache, which reads the whole of its rows again at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.program.run_plan import PaddingSide
from mlx_transmuter.runtime.steps import (
    DecoderError,
    DecoderGraph,
    call_graph,
    check_logits,
    check_new_tokens,
    gather_logits,
)

if TYPE_CHECKING:
    from mlx_transmuter.runtime.decoder import Decoder


class FullContextSession:
    """One generation of a decoder's rows, as a Run is; what it keeps are the rows' tokens.

    A step runs the graph over all tokens so far, in a bucket of columns with padding on the side that the plan says, so
    that few shapes are compiled; without padding a step is compiled for each length.
    """

    def __init__(self, decoder: Decoder, total: Sequence[int], given: Mapping[str, mx.array]):
        self.decoder, self.extra_inputs = decoder, given
        self.max_lengths = np.asarray(total, np.int32)
        self.lengths = np.zeros(decoder.rows, np.int32)
        self.copied_slots = 0
        self.paged, self.runs_ahead, self.max_step_tokens = True, False, None
        self._tokens: np.ndarray | None = None
        self._positions: np.ndarray | None = None
        self._closed = False

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """Lazy logits [rows, vocab] at the last real token of each row; as `Run.step`."""
        decoder = self.decoder
        if self._closed:
            raise DecoderError("a run that was closed", "a run under way", "begin another")
        new = check_new_tokens(decoder.rows, self.lengths, self.max_lengths, tokens, counts)
        if decoder.needs_equal_lengths and (self.lengths[new > 0] + new[new > 0] != (self.lengths + new).max()).any():
            raise DecoderError(f"rows of {(self.lengths + new).tolist()} tokens", "rows of one length in a run")
        pieces = ops.to_host(tokens) if isinstance(tokens, mx.array) else np.asarray(tokens)
        most = int(self.max_lengths.max())
        if self._tokens is None:
            self._tokens = np.zeros((decoder.rows, most, *pieces.shape[2:]), pieces.dtype)
        if positions is not None and self._positions is None:
            self._positions = np.broadcast_to(
                np.arange(most, dtype=np.int32), (*np.shape(positions)[:-2], decoder.rows, most)
            ).copy()
        for row, count in enumerate(new.tolist()):
            end = self.lengths[row] + count
            self._tokens[row, self.lengths[row] : end] = pieces[row, :count]
            if positions is not None and self._positions is not None:
                self._positions[..., row, self.lengths[row] : end] = np.asarray(positions)[..., row, :count]
        self.lengths = self.lengths + new
        length, padding = int(self.lengths.max()), decoder.plan.padding_side
        width = length if padding == "none" else decoder.full_context_columns(length)
        placed = self._positions is not None
        step = decoder.compile_once(("reread", width, placed), lambda: make_full_context_step(decoder.graph, padding))
        places = mx.array(self._pad_rows(self._positions, -1, width)) if self._positions is not None else None
        read = mx.array(self._pad_rows(self._tokens, 1, width))
        return step(read, mx.array(self.lengths), places, self.extra_inputs)

    def _pad_rows(self, kept: np.ndarray, axis: int, width: int) -> np.ndarray:
        """The kept values in `width` columns of `axis`, those of each row on its side of the padding."""
        kept = np.moveaxis(kept, axis, -1)[..., :width]
        laid = np.zeros((*kept.shape[:-1], width), kept.dtype)
        laid[..., : kept.shape[-1]] = kept
        if self.decoder.plan.padding_side == "left":
            rows = laid.ndim - 2 if axis == -1 else 0
            for row, length in enumerate(self.lengths.tolist()):
                at = (slice(None),) * rows + (row,)
                laid[at] = np.roll(laid[at], width - length, axis=-1)
        return np.moveaxis(laid, -1, axis)

    def fork(self, parents: Sequence[int]) -> None:
        """From now on row r continues after the tokens of row parents[r]."""
        order = list(parents)
        self.lengths = self.lengths[order]
        self.max_lengths = np.maximum(self.max_lengths, self.max_lengths[order])
        if self._tokens is not None:
            self._tokens = self._tokens[order]
        if self._positions is not None:
            self._positions = self._positions[..., order, :]

    def verify_draft(self, tokens: Any, ancestor_mask: Any, depths: Any) -> mx.array:
        """Raises DecoderError: there is no cache that could hold a guess."""
        raise DecoderError("a draft for a graph with no cache", "one whose attention is over pools", "run plain steps")

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        """Raises DecoderError: there is no draft to accept tokens of."""
        raise DecoderError("a draft for a graph with no cache", "one whose attention is over pools", "run plain steps")

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        """Raises DecoderError: several prompts in one row need attention over pools."""
        raise DecoderError("a packed prefill for a graph with no cache", "one whose attention is over pools")

    def truncate(self, lengths: Sequence[int]) -> None:
        """Raises DecoderError: there is no cache to truncate."""
        raise DecoderError("a truncation for a graph with no cache", "one whose attention is over pools")

    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        """Raises DecoderError: there is no cache that could keep a prefix."""
        raise DecoderError("a prompt cache for a graph with no cache", "one whose attention is over pools")

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        """The one evaluation of a step."""
        (mx.eval if wait else mx.async_eval)(*arrays)

    def close(self) -> None:
        """The run is over."""
        self._tokens = self._positions = None
        self._closed = True


def make_full_context_step(graph: DecoderGraph, padding: PaddingSide) -> Callable[..., Any]:
    """A step over whole rows: (tokens [rows, width], lengths, positions, given) → logits [rows, vocab]."""

    def run(tokens, lengths, positions, given):
        rows, width = tokens.shape[:2]
        lengths = mx.maximum(lengths, 1)[:, None]  # a padding row sees something, for the softmax's sake
        columns = mx.broadcast_to(mx.arange(width, dtype=mx.int32), (rows, width))
        place = columns - (width - lengths) if padding == "left" else columns
        mask = (place >= 0) & (place < lengths)
        place = mx.maximum(place, 0) if positions is None else positions
        ends = mx.full((rows,), width - 1, mx.int32) if padding == "left" else lengths[:, 0] - 1
        feed = graph.step_inputs.feed(
            tokens=tokens, positions=place, past={}, mask=mask, logit_indices=ends[:, None], extra_inputs=given
        )
        return gather_logits(check_logits(graph, call_graph(graph, feed, rows)), ends)

    return run
