"""Prompt lookup: guesses from what followed the row's last tokens before. Saxena 2023, prompt_lookup_num_tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mlx_transmuter.generation.guesses import BRANCHES, Tree, merged
from mlx_transmuter.generation.rows import Row
from mlx_transmuter.generation.state import State

# How many of the latest places are looked at for continuations.
PLACES = 16


class Index:
    """Where each n-gram of a text ends, for n up to `longest`; grown by what the text has more at each look."""

    def __init__(self, longest: int):
        self.longest, self.length = longest, 0
        self._ends: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(longest)]

    def continuations(self, text: Sequence[int], most: int) -> list[list[int]]:
        """What followed, up to `most` tokens, the longest n-gram that ends the text and stood before in it.

        The latest first, at most BRANCHES different ones. One that reaches the text's end goes on with itself, as a
        copy of Lempel and Ziv 1977 does, so that what repeats with a short period is guessed as far as anything else.
        """
        # The n-grams that end the text are not in the index: nothing follows them yet.
        for end in range(self.length + 1, len(text)):
            for n in range(1, min(self.longest, end) + 1):
                self._ends[n - 1][tuple(text[end - n : end])].append(end)
        self.length = max(self.length, len(text) - 1)
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            if ends := self._ends[n - 1].get(tuple(text[-n:])):
                found: dict[tuple[int, ...], None] = {}
                for end in ends[: -PLACES - 1 : -1]:
                    found.setdefault(tuple(_copied(text, end, most)))
                return [list(tokens) for tokens in found][:BRANCHES]
        return []


class PromptLookup:
    """Guesses for the rows of a group of prompts, each from its own text."""

    def __init__(self, longest: int, eos: Sequence[int]):
        self.longest, self.eos = longest, frozenset(eos)
        self._indices: dict[int, Index] = {}

    def propose(
        self, rows: Mapping[int, Row], most: Mapping[int, int], deepest: Mapping[int, int], *_: State
    ) -> dict[int, Tree]:
        """A tree for each row: at most most[r] guesses, deepest[r] of them in a path.

        Nothing follows an eos, so none is guessed.
        """
        trees = {}
        for row, text in rows.items():
            index = self._indices.setdefault(row, Index(self.longest))
            found = index.continuations(text.text, min(most[row], deepest[row])) if most[row] else []
            cut = [tokens[: next((i for i, token in enumerate(tokens) if token in self.eos), None)] for tokens in found]
            trees[row] = merged(text.text[-1], cut, most[row])
        return trees

    def close(self) -> None:
        """Nothing is held but lists."""


def _copied(text: Sequence[int], start: int, count: int) -> list[int]:
    """count tokens from start on, those that it copied counted with the text's."""
    period = len(text) - start
    return [text[start + i % period] for i in range(count)]
