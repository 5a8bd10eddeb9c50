"""FullContextSession: a session of a decoder without a cache, which reads all tokens of its rows at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_transmuter.runtime.errors import DecoderError
from mlx_transmuter.runtime.row_history import RowHistory
from mlx_transmuter.runtime.session import DecoderSession, run_by_side
from mlx_transmuter.runtime.steps.full_context import FullContextInputs, FullContextStep

if TYPE_CHECKING:
    from mlx_transmuter.runtime.decoder import Decoder


class FullContextSession(DecoderSession):
    """A session that keeps its rows' tokens, and no cache.

    A step runs the graph over all tokens so far, in a bucket of columns with padding on the side that the plan says, so
    that few shapes are compiled; without padding a step is compiled for each length.
    """

    def __init__(self, decoder: Decoder, max_lengths: Sequence[int], extra_inputs: Mapping[str, mx.array]):
        super().__init__(decoder, max_lengths, extra_inputs)
        self._history = RowHistory(decoder.rows, int(self.max_lengths.max()))
        self._closed = False

    def step(self, tokens: Any, counts: Sequence[int], positions: Any = None) -> mx.array:
        """See DecoderSession.step."""
        decoder, padding_side = self.decoder, self.decoder.plan.padding_side
        if self._closed:
            raise DecoderError("a session that was closed", "an open session", "begin another")
        tokens = self._check_tokens(tokens)
        new = self._check_counts(tokens, counts)
        lengths = self.lengths + new
        if decoder.needs_equal_lengths and (lengths[new > 0] != lengths.max()).any():
            raise DecoderError(f"rows of {lengths.tolist()} tokens", "rows of one length in a session")
        self._history.append(tokens, new, self.lengths, positions)
        self.lengths = lengths
        longest = int(lengths.max())
        columns = longest if padding_side == "none" else decoder.full_context_columns(longest)
        positions = self._history.positions
        inputs = FullContextInputs(
            tokens=mx.array(self._padded(self._history.tokens, 1, columns)),
            lengths=mx.array(self.lengths),
            positions=None if positions is None else mx.array(self._padded(positions, -1, columns)),
            extra_inputs=dict(self.extra_inputs),
        )

        def run(side: int, _: np.ndarray) -> mx.array:
            return decoder.compile_once(FullContextStep(columns, padding_side, positions is not None, side))(inputs)

        return run_by_side(decoder.sides_of(lengths), new > 0, run)

    def _padded(self, values: np.ndarray, axis: int, columns: int) -> np.ndarray:
        """Returns the rows' values with `columns` columns on `axis`, each row's padding on the plan's side."""
        values = np.moveaxis(values, axis, -1)[..., :columns]
        padded = np.zeros((*values.shape[:-1], columns), values.dtype)
        padded[..., : values.shape[-1]] = values
        if self.decoder.plan.padding_side == "left":
            row_axis = padded.ndim - 2 if axis == -1 else 0
            for row, length in enumerate(self.lengths.tolist()):
                index = (slice(None),) * row_axis + (row,)
                padded[index] = np.roll(padded[index], columns - length, axis=-1)
        return np.moveaxis(padded, -1, axis)

    def fork(self, parents: Sequence[int]) -> None:
        """Makes row r continue after the tokens of row parents[r] from now on."""
        super().fork(parents)
        self._history.fork(parents)

    def close(self) -> None:
        """Ends the session."""
        self._history = RowHistory(self.decoder.rows, 0)
        self._closed = True
