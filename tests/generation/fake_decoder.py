"""A language model that is a pure function of each row's tokens, behind the interface of the decoder.

The logits after a prefix come from a hash of the whole prefix, so a token read from the wrong row, a lost fork, a
padding token taken for a real one or a wrong order of steps changes the text at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

SPREAD = 3.0


@lru_cache(maxsize=200_000)
def _logits(prefix: tuple[int, ...], vocab: int, salt: int) -> np.ndarray:
    seed = np.random.SeedSequence([salt, len(prefix), *prefix])
    return (np.random.default_rng(seed).standard_normal(vocab) * SPREAD).astype(np.float32)


def logits_after(prefix: Sequence[int], vocab: int, salt: int = 0) -> np.ndarray:
    """float32 [vocab]: the logits of the token after prefix."""
    return _logits(tuple(int(token) for token in prefix), vocab, salt)


class FakeDecoder:
    """What generation sees of a decoder, over `logits_after`.

    With `by_length`, rows of different lengths share no run, as in a grown cache. `salts` gives each row its own
    language, for checks of inputs that belong to rows. With `memory`, only the last tokens of a prefix count, so that texts
    repeat themselves. Every run is kept in `runs` with the calls that it got.
    """

    prompts = "parts"

    def __init__(
        self,
        rows: int,
        vocab: int = 16,
        *,
        max_positions: int | None = None,
        by_length: bool = False,
        runs_ahead: bool = False,
        dtype: mx.Dtype = mx.float32,
        salt: int = 0,
        memory: int = 0,
        supports: tuple[str, ...] = ("pages", "forks", "drafts"),
    ):
        self.rows, self.vocab, self.max_positions = rows, vocab, max_positions
        self.by_length, self.runs_ahead, self.dtype, self.salt = by_length, runs_ahead, dtype, salt
        self.memory, self.supports = memory, frozenset(supports)
        self.compilations = 0
        self.runs: list[FakeRun] = []

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [vocab]: the logits after a row's tokens."""
        return logits_after(tokens[-self.memory :], self.vocab, self.salt)

    def groups(self, lengths: list[int]) -> list[list[int]]:
        rows = [row for row, length in enumerate(lengths) if length]
        if not self.by_length:
            return [rows] if rows else []
        return [[row for row in rows if lengths[row] == length] for length in sorted({lengths[row] for row in rows})]

    def begin(self, total: list[int], inputs: Mapping[str, mx.array] | None = None, paged: bool = False) -> FakeRun:
        assert len(total) == self.rows
        self.runs.append(FakeRun(self, total, inputs, paged))
        return self.runs[-1]


class FakeRun:
    """One group of rows: their tokens so far, and a record of the calls."""

    largest = None

    def __init__(self, decoder: FakeDecoder, total: list[int], inputs: Mapping[str, mx.array] | None, paged: bool):
        self.decoder, self.total, self.inputs, self.paged = decoder, total, dict(inputs or {}), paged
        self.tokens: list[list[int]] = [[] for _ in total]
        self.steps: list[tuple[int, list[int]]] = []
        self.positions: list[np.ndarray] = []
        self.waits: list[bool] = []
        self.drafts: list[int] = []
        self.guessed: list[list[list[int]]] | None = None
        self.copies = 0
        self.closed = False
        self.runs_ahead = decoder.runs_ahead

    def step(self, tokens: np.ndarray | mx.array, counts: list[int], positions: np.ndarray | None = None) -> mx.array:
        assert not self.closed
        tokens = np.array(tokens)
        assert tokens.dtype == np.int32
        assert tokens.shape[0] == self.decoder.rows == len(counts)
        assert 0 <= tokens.min() <= tokens.max() < self.decoder.vocab
        self.steps.append((tokens.shape[1], list(counts)))
        if positions is not None:
            self.positions.append(np.array(positions))
        logits = np.full((len(counts), self.decoder.vocab), np.nan, np.float32)
        for row, count in enumerate(counts):
            self.tokens[row] += tokens[row, :count].tolist()
            assert len(self.tokens[row]) <= self.total[row], "more tokens than the row was said to hold"
            if count:
                logits[row] = self.decoder.logits(self.tokens[row])
        return mx.array(logits).astype(self.decoder.dtype)

    def draft(self, tokens: np.ndarray, sees: np.ndarray, depths: np.ndarray) -> mx.array:
        assert self.paged
        assert self.guessed is None
        assert tokens.shape == depths.shape == sees.shape[:2]
        self.drafts.append(tokens.shape[1])
        self.guessed = []
        logits = np.full((*tokens.shape, self.decoder.vocab), np.nan, np.float32)
        for row, known in enumerate(self.tokens):
            paths = [[int(token) for token in tokens[row][sees[row, node]]] for node in range(tokens.shape[1])]
            self.guessed.append(paths)
            for node, path in enumerate(paths):
                if depths[row, node] >= 0:
                    assert len(path) == depths[row, node] + 1
                    assert len(known) + len(path) <= self.total[row]
                    logits[row, node] = self.decoder.logits([*known, *path])
        return mx.array(logits).astype(self.decoder.dtype)

    def accept(self, kept: Sequence[Sequence[int]]) -> None:
        assert self.guessed is not None
        for row, (paths, path) in enumerate(zip(self.guessed, kept, strict=True)):
            if path:
                assert len(paths[path[-1]]) == len(path)
                self.tokens[row] += paths[path[-1]]
        self.guessed = None

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens], np.int32)

    def back(self, lengths: Sequence[int]) -> None:
        assert all(length <= len(tokens) for tokens, length in zip(self.tokens, lengths, strict=True))
        self.tokens = [tokens[:length] for tokens, length in zip(self.tokens, lengths, strict=True)]

    def fork(self, parents: list[int]) -> None:
        assert self.paged
        self.tokens = [list(self.tokens[parent]) for parent in parents]

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        self.waits.append(wait)
        (mx.eval if wait else mx.async_eval)(*arrays)

    def close(self) -> None:
        self.closed = True
