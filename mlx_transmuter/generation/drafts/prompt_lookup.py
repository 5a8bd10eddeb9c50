"""Prompt lookup: guesses from what followed the row's last tokens before. Saxena 2023, prompt_lookup_num_tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mlx_transmuter.generation.drafts.draft_tree import MAX_BRANCHES, DraftTree, merge_continuations
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.row import Row

# How many of the latest places are looked at for continuations.
MAX_MATCHES = 16


class NgramContinuations:
    """Where each n-gram of a text ends, for n up to `longest`; grown by what the text has more at each look."""

    def __init__(self, longest: int):
        self.max_ngram_size, self.indexed_length = longest, 0
        self._ends: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(longest)]

    def continuations(self, sequence: Sequence[int], max_tokens: int) -> list[list[int]]:
        """What followed, up to `most` tokens, the longest n-gram that ends the text and stood before in it.

        The latest first, at most BRANCHES different ones. One that reaches the text's end goes on with itself, as a
        copy of Lempel and Ziv 1977 does, so that what repeats with a short period is guessed as far as anything else.
        """
        # The n-grams that end the text are not in the index: nothing follows them yet.
        for end in range(self.indexed_length + 1, len(sequence)):
            for n in range(1, min(self.max_ngram_size, end) + 1):
                self._ends[n - 1][tuple(sequence[end - n : end])].append(end)
        self.indexed_length = max(self.indexed_length, len(sequence) - 1)
        for n in range(min(self.max_ngram_size, len(sequence) - 1), 0, -1):
            if ends := self._ends[n - 1].get(tuple(sequence[-n:])):
                found: dict[tuple[int, ...], None] = {}
                for end in ends[: -MAX_MATCHES - 1 : -1]:
                    found.setdefault(tuple(_copy_periodic(sequence, end, max_tokens)))
                return [list(tokens) for tokens in found][:MAX_BRANCHES]
        return []


class PromptLookupDrafter:
    """Guesses for the rows of a group of prompts, each from its own text."""

    def __init__(self, longest: int, eos: Sequence[int]):
        self.max_ngram_size, self.eos_token_ids = longest, frozenset(eos)
        self._indices: dict[int, NgramContinuations] = {}

    def propose(
        self, rows: Mapping[int, Row], max_nodes: Mapping[int, int], max_depths: Mapping[int, int], *_: ProcessorState
    ) -> dict[int, DraftTree]:
        """A tree for each row: at most most[r] guesses, deepest[r] of them in a path.

        Nothing follows an eos, so none is guessed.
        """
        trees = {}
        for row, text in rows.items():
            index = self._indices.setdefault(row, NgramContinuations(self.max_ngram_size))
            found = index.continuations(text.sequence, min(max_nodes[row], max_depths[row])) if max_nodes[row] else []
            cut = [
                tokens[: next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)]
                for tokens in found
            ]
            trees[row] = merge_continuations(text.sequence[-1], cut, max_nodes[row])
        return trees

    def close(self) -> None:
        """Nothing is held but lists."""


def _copy_periodic(text: Sequence[int], start: int, count: int) -> list[int]:
    """count tokens from start on, those that it copied counted with the text's."""
    period = len(text) - start
    return [text[start + i % period] for i in range(count)]
