"""A language model that is a pure function of each row's tokens, behind the interface of the decoder.

The logits after a prefix come from a hash of the whole prefix, so a token read from the wrong row, a lost fork, a
padding token taken for a real one or a wrong order of steps changes the tokens at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_transmuter.program.position_limit import PositionLimit

LOGITS_SPREAD = 3.0


@lru_cache(maxsize=200_000)
def _logits(prefix: tuple[int, ...], vocab: int, salt: int) -> np.ndarray:
    seed = np.random.SeedSequence([salt, len(prefix), *prefix])
    return (np.random.default_rng(seed).standard_normal(vocab) * LOGITS_SPREAD).astype(np.float32)


def logits_after(prefix: Sequence[int], vocab: int, salt: int = 0) -> np.ndarray:
    """Returns float32 [vocab]: the logits of the token after prefix."""
    return _logits(tuple(int(token) for token in prefix), vocab, salt)


class FakeDecoder:
    """The interface of a decoder that generation uses, over `logits_after`.

    by_length: rows of different lengths share no session, as in mode grow. salt: selects another language model. memory:
    how many last tokens of a prefix count, so that rows repeat themselves; 0 for all. `sessions` has every session, with
    the calls that it got.
    """

    prompt_mode = "chunks"
    pads_last_chunk = False

    def __init__(
        self,
        rows: int,
        vocab: int = 16,
        *,
        max_positions: int | None = None,
        trained_length: int | None = None,
        by_length: bool = False,
        runs_ahead: bool = False,
        dtype: mx.Dtype = mx.float32,
        salt: int = 0,
        memory: int = 0,
        supports_drafts: bool = True,
    ):
        self.rows, self.vocab_size, self.max_positions, self.trained_length = rows, vocab, max_positions, trained_length
        self.position_limit = None if max_positions is None else PositionLimit(max_positions, "wpe")
        self.groups_by_length, self.runs_ahead, self.dtype, self.salt = by_length, runs_ahead, dtype, salt
        self.context_length, self.supports_drafts, self.supports_packed_prefill = memory, supports_drafts, False
        self.compilations = 0
        self.sessions: list[FakeSession] = []

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns float32 [vocab]: the logits after a row's tokens."""
        return logits_after(tokens[-self.context_length :], self.vocab_size, self.salt)

    def group_rows(self, lengths: list[int]) -> list[list[int]]:
        rows = [row for row, length in enumerate(lengths) if length]
        if not self.groups_by_length:
            return [rows] if rows else []
        return [[row for row in rows if lengths[row] == length] for length in sorted({lengths[row] for row in rows})]

    def begin_session(
        self,
        max_lengths: list[int],
        extra_inputs: Mapping[str, mx.array] | None = None,
        paged: bool = False,
        forked_lengths: Sequence[int] = (),
    ) -> FakeSession:
        assert len(max_lengths) == self.rows
        assert not forked_lengths or all(
            forked <= most for forked, most in zip(forked_lengths, max_lengths, strict=True)
        )
        self.sessions.append(FakeSession(self, max_lengths, extra_inputs, paged))
        return self.sessions[-1]


class FakeSession:
    """One group of rows: their tokens so far, and a record of the calls."""

    max_step_tokens = None

    def __init__(self, decoder: FakeDecoder, total: list[int], inputs: Mapping[str, mx.array] | None, paged: bool):
        self.decoder, self.max_lengths, self.extra_inputs, self.paged = decoder, total, dict(inputs or {}), paged
        self.tokens: list[list[int]] = [[] for _ in total]
        self.steps: list[tuple[int, list[int]]] = []
        self.positions: list[np.ndarray] = []
        self.evaluate_waits: list[bool] = []
        self.draft_sizes: list[int] = []
        self.drafted_paths: list[list[list[int]]] | None = None
        self.copied_slots = 0
        self.closed = False
        self.runs_ahead = decoder.runs_ahead

    def step(self, tokens: np.ndarray | mx.array, counts: list[int], positions: np.ndarray | None = None) -> mx.array:
        assert not self.closed
        tokens = np.array(tokens)
        assert tokens.dtype == np.int32
        assert tokens.shape[0] == self.decoder.rows == len(counts)
        assert 0 <= tokens.min() <= tokens.max() < self.decoder.vocab_size
        self.steps.append((tokens.shape[1], list(counts)))
        if positions is not None:
            self.positions.append(np.array(positions))
        logits = np.full((len(counts), self.decoder.vocab_size), np.nan, np.float32)
        for row, count in enumerate(counts):
            self.tokens[row] += tokens[row, :count].tolist()
            assert len(self.tokens[row]) <= self.max_lengths[row], "more tokens than the max_lengths of the row"
            if count:
                logits[row] = self.decoder.next_logits(self.tokens[row])
        return mx.array(logits).astype(self.decoder.dtype)

    def announce_prompts(self, lengths: Sequence[int], max_chunk_tokens: int) -> None:
        assert len(lengths) == self.decoder.rows
        assert all(length <= limit for length, limit in zip(lengths, self.max_lengths, strict=True))
        assert max_chunk_tokens >= 1

    def draft_limits(self) -> None:
        return None

    def verify_draft(self, tokens: np.ndarray, ancestor_mask: np.ndarray, depths: np.ndarray) -> mx.array:
        assert self.paged
        assert self.drafted_paths is None
        assert tokens.shape == depths.shape == ancestor_mask.shape[:2]
        self.draft_sizes.append(tokens.shape[1])
        self.drafted_paths = []
        logits = np.full((*tokens.shape, self.decoder.vocab_size), np.nan, np.float32)
        for row, known in enumerate(self.tokens):
            paths = [[int(token) for token in tokens[row][ancestor_mask[row, node]]] for node in range(tokens.shape[1])]
            self.drafted_paths.append(paths)
            for node, path in enumerate(paths):
                if depths[row, node] >= 0:
                    assert len(path) == depths[row, node] + 1
                    assert len(known) + len(path) <= self.max_lengths[row]
                    logits[row, node] = self.decoder.next_logits([*known, *path])
        return mx.array(logits).astype(self.decoder.dtype)

    def accept(self, accepted: Sequence[Sequence[int]]) -> None:
        assert self.drafted_paths is not None
        for row, (paths, path) in enumerate(zip(self.drafted_paths, accepted, strict=True)):
            if path:
                assert len(paths[path[-1]]) == len(path)
                self.tokens[row] += paths[path[-1]]
        self.drafted_paths = None

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens], np.int32)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert all(length <= len(tokens) for tokens, length in zip(self.tokens, lengths, strict=True))
        self.tokens = [tokens[:length] for tokens, length in zip(self.tokens, lengths, strict=True)]

    def fork(self, parents: list[int]) -> None:
        assert self.paged
        self.tokens = [list(self.tokens[parent]) for parent in parents]

    def prefill_packed(self, prompts: Sequence[Sequence[int]], seq: int) -> mx.array:
        raise AssertionError("this decoder supports no packed prefill")

    def store_prefixes(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        raise AssertionError("this decoder has no prompt cache")

    def end_rows(self, row_tokens: Sequence[Sequence[int] | None]) -> None:
        raise AssertionError("this decoder has no prompt cache")

    def evaluate(self, *arrays: mx.array, wait: bool = True) -> None:
        self.evaluate_waits.append(wait)
        (mx.eval if wait else mx.async_eval)(*arrays)

    def close(self) -> None:
        self.closed = True
