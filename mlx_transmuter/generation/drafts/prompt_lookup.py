"""Prompt lookup: drafts from what followed the row's last tokens before (Saxena 2023; prompt_lookup_num_tokens)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mlx_transmuter.generation.drafts.draft_tree import MAX_BRANCHES, DraftTree, merge_continuations
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.row import Row

# How many of the latest matches are searched for continuations.
MAX_MATCHES = 16


class NgramContinuations:
    """Where each n-gram of a sequence ends, for n up to max_ngram_size; extended by the sequence's new tokens at each
    lookup."""

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size, self.indexed_length = max_ngram_size, 0
        self._ends: list[dict[tuple[int, ...], list[int]]] = [defaultdict(list) for _ in range(max_ngram_size)]

    def continuations(self, sequence: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Returns what followed, up to max_tokens, earlier occurrences of the longest n-gram that ends the sequence and
        has one.

        The latest come first, at most MAX_BRANCHES different ones. One that reaches the end of the sequence continues
        with itself, as a copy of Lempel and Ziv 1977 does, so that a short period is drafted as far as anything else.
        """
        self._index(sequence)
        for n in range(min(self.max_ngram_size, len(sequence) - 1), 0, -1):
            if ends := self._ends[n - 1].get(tuple(sequence[-n:])):
                latest = ends[: -MAX_MATCHES - 1 : -1]
                different = dict.fromkeys(tuple(_copy_periodic(sequence, end, max_tokens)) for end in latest)
                return [list(tokens) for tokens in different][:MAX_BRANCHES]
        return []

    def _index(self, sequence: Sequence[int]) -> None:
        """Indexes the n-grams of the new tokens, but for those that end the sequence: nothing follows them yet."""
        for end in range(self.indexed_length + 1, len(sequence)):
            for n in range(1, min(self.max_ngram_size, end) + 1):
                self._ends[n - 1][tuple(sequence[end - n : end])].append(end)
        self.indexed_length = max(self.indexed_length, len(sequence) - 1)


class PromptLookupDrafter:
    """Drafts for the rows of a group of prompts, each from its own sequence."""

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        self._indices: dict[int, NgramContinuations] = {}

    def propose(
        self, rows: Mapping[int, Row], max_nodes: Mapping[int, int], max_depths: Mapping[int, int], *_: ProcessorState
    ) -> dict[int, DraftTree]:
        """Returns a tree for each row r: at most max_nodes[r] draft tokens, max_depths[r] of them in a path.

        Nothing follows an eos, so none is drafted.
        """
        return {index: self._draft(index, row, max_nodes[index], max_depths[index]) for index, row in rows.items()}

    def close(self) -> None:
        """Frees nothing: the drafter holds no device memory."""

    def _draft(self, index: int, row: Row, max_nodes: int, max_depth: int) -> DraftTree:
        ngrams = self._indices.setdefault(index, NgramContinuations(self.max_ngram_size))
        continuations = ngrams.continuations(row.token_ids, min(max_nodes, max_depth)) if max_nodes else []
        without_eos = [row.stop_rules.before_eos(tokens) for tokens in continuations]
        return merge_continuations(row.token_ids[-1], without_eos, max_nodes)


def _copy_periodic(sequence: Sequence[int], start: int, count: int) -> list[int]:
    """Returns `count` tokens from `start` on; after the last one the copy continues with what it copied."""
    period = len(sequence) - start
    return [sequence[start + i % period] for i in range(count)]
