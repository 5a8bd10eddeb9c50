"""Prompt lookup: what it drafts, against brute force over the row's sequence."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.generation.drafts.draft_tree import MAX_BRANCHES
from mlx_transmuter.generation.drafts.prompt_lookup import MAX_MATCHES, NgramContinuations, PromptLookupDrafter
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.stop_rules import StopRules


def continuations_by_scan(sequence: list[int], max_ngram_size: int, max_tokens: int) -> list[list[int]]:
    """Returns the continuations by comparing every index of the sequence."""
    for n in range(min(max_ngram_size, len(sequence) - 1), 0, -1):
        ends = [end for end in range(n, len(sequence)) if sequence[end - n : end] == sequence[-n:]][::-1][:MAX_MATCHES]
        found = []
        for end in ends:
            copy = list(sequence)
            for place in range(end, end + max_tokens):
                copy.append(copy[place])
            if copy[len(sequence) :] not in found:
                found.append(copy[len(sequence) :])
        if found:
            return found[:MAX_BRANCHES]
    return []


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
def test_continuations_are_those_of_brute_force_as_the_sequence_grows(sequence, max_ngram_size, max_tokens, step):
    index = NgramContinuations(max_ngram_size)
    for length in range(1, len(sequence) + 1, step):
        assert index.continuations(sequence[:length], max_tokens) == continuations_by_scan(
            sequence[:length], max_ngram_size, max_tokens
        )


def test_prompt_lookup_drafts_no_eos_and_no_deeper_than_allowed():
    sequence = [1, 2, 3, 4, 5, 1, 2]
    row = Row(sequence, 10, StopRules(frozenset({4})))
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 9}).values()
    assert tree.tokens == [2, 3]
    row = Row(sequence, 10)
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 2}).values()
    assert tree.tokens == [2, 3, 4]
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 0}).values()
    assert tree.tokens == [2]


def test_matches_that_differ_make_a_tree():
    row = Row([1, 2, 3, 1, 2, 4, 1, 2], 10)
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 9}).values()
    assert {tuple(tree.tokens_to(node)) for node in range(len(tree))} == {(), (4,), (3,), (4, 1), (3, 1), (4, 1, 2)}
