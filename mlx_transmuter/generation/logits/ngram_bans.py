"""The tokens that would repeat an n-gram, from an index per prompt that grows by one n-gram with each new token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence


class NgramBans:
    """The n-grams of a prompt, and those of the rows that continue it.

    Beams share one index. An n-gram that a row adds is stored with the position at which it ends; it bans its last
    token in a row only if that row's tokens spell the n-gram at that position. So a fork copies nothing, and a dropped
    beam leaves nothing to undo.
    """

    def __init__(self, size: int, tokens: Sequence[int]):
        """size: n, 2 or more. tokens: the prompt that rows begin with, or the encoder's tokens."""
        self.size = size
        self._prompt_ngrams: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self._row_ngrams: dict[tuple[int, ...], set[tuple[int, int]]] = defaultdict(set)
        for end in range(size, len(tokens) + 1):
            *start, last = tokens[end - size : end]
            self._prompt_ngrams[tuple(start)].add(last)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds the n-gram that ends a row's tokens, prompt included."""
        if len(tokens) >= self.size:
            *start, last = tokens[-self.size :]
            self._row_ngrams[tuple(start)].add((last, len(tokens)))

    def banned_ids(self, tokens: Sequence[int]) -> set[int]:
        """Returns the ids that would complete, after tokens, an n-gram that the prompt or the row has."""
        if len(tokens) < self.size - 1:
            return set()
        start = tuple(tokens[len(tokens) - self.size + 1 :])
        return self._prompt_ngrams.get(start, set()) | set(self._banned_by_row(start, tokens))

    def _banned_by_row(self, start: tuple[int, ...], tokens: Sequence[int]) -> Iterator[int]:
        for last, end in self._row_ngrams.get(start, ()):
            if end <= len(tokens) and tuple(tokens[end - self.size : end]) == (*start, last):
                yield last
