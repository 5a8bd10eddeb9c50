"""RowHistory: the tokens that a session's rows have had, for what reads them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops


class _Addition(NamedTuple):
    tokens: Any
    counts: np.ndarray
    lengths: np.ndarray
    positions: Any


class RowHistory:
    """The first `width` tokens of each of `rows` rows, with their positions once any come with positions of their own.

    Tokens may come before they are evaluated: the newest stay on the device until a later step, or a reader, needs
    them.
    """

    def __init__(self, rows: int, width: int):
        self.rows, self.width = rows, width
        self._tokens: np.ndarray | None = None
        self._positions: np.ndarray | None = None
        self._additions: list[_Addition] = []

    @property
    def tokens(self) -> np.ndarray:
        """int32 [rows, width], or embeddings [rows, width, dim]; unspecified where a row has no token."""
        self._store_all_but(0)
        return np.zeros((self.rows, self.width), np.int32) if self._tokens is None else self._tokens

    @property
    def positions(self) -> np.ndarray | None:
        """int32 [rows, width] or [axes, rows, width]; None where each token is at its index in its row."""
        self._store_all_but(0)
        return self._positions

    def append(self, tokens: Any, counts: np.ndarray, lengths: np.ndarray, positions: Any = None) -> None:
        """Adds the first counts[r] of tokens [rows, seq, ...] to row r, which has lengths[r]; what is past the width is
        left out.

        positions: int32 [rows, seq] or [axes, rows, seq]. Tokens that come without, in a history that has some, are at
        their indices.
        """
        self._additions.append(_Addition(tokens, counts, lengths, positions))
        self._store_all_but(1)

    def fork(self, parents: Sequence[int]) -> None:
        """Gives row r the tokens of row parents[r]."""
        self._store_all_but(0)
        order = list(parents)
        if self._tokens is not None:
            self._tokens = self._tokens[order]
        if self._positions is not None:
            self._positions = self._positions[..., order, :]

    def _store_all_but(self, count: int) -> None:
        while len(self._additions) > count:
            self._store(self._additions.pop(0))

    def _store(self, added: _Addition) -> None:
        rows = [
            (row, start, min(count, self.width - start))
            for row, (start, count) in enumerate(zip(added.lengths.tolist(), added.counts.tolist(), strict=True))
            if count and start < self.width
        ]
        if not rows:
            return
        tokens = ops.to_host(added.tokens) if isinstance(added.tokens, mx.array) else np.asarray(added.tokens)
        if self._tokens is None:
            self._tokens = np.zeros((self.rows, self.width, *tokens.shape[2:]), tokens.dtype)
        if added.positions is not None and self._positions is None:
            indices, axes = np.arange(self.width, dtype=np.int32), np.shape(added.positions)[:-2]
            self._positions = np.broadcast_to(indices, (*axes, self.rows, self.width)).copy()
        for row, start, count in rows:
            self._tokens[row, start : start + count] = tokens[row, :count]
            if self._positions is not None:
                positions = None if added.positions is None else np.asarray(added.positions)[..., row, :count]
                indices = np.arange(start, start + count)
                self._positions[..., row, start : start + count] = indices if positions is None else positions
