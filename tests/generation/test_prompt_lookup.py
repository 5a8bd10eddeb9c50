"""Prompt lookup: what it drafts, against brute force over the row's sequence."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_transmuter.generation.drafts.draft_tree import MAX_BRANCHES
from mlx_transmuter.generation.drafts.prompt_lookup import MAX_MATCHES, NgramContinuations, PromptLookupDrafter
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.stop_rules import StopRules


def continuations_by_scan(text: list[int], longest: int, most: int) -> list[list[int]]:
    """The continuations by comparing every place of the text."""
    for n in range(min(longest, len(text) - 1), 0, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]][::-1][:MAX_MATCHES]
        found = []
        for end in ends:
            copy = list(text)
            for place in range(end, end + most):
                copy.append(copy[place])
            if copy[len(text) :] not in found:
                found.append(copy[len(text) :])
        if found:
            return found[:MAX_BRANCHES]
    return []


@settings(max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 6), st.integers(1, 8))
def test_continuations_are_those_of_brute_force_as_the_sequence_grows(text, longest, most, step):
    index = NgramContinuations(longest)
    for length in range(1, len(text) + 1, step):
        assert index.continuations(text[:length], most) == continuations_by_scan(text[:length], longest, most)


def test_prompt_lookup_drafts_no_eos_and_no_deeper_than_allowed():
    text = [1, 2, 3, 4, 5, 1, 2]
    row = Row(text, 10, StopRules(frozenset({4})))
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 9}).values()
    assert tree.tokens == [2, 3]
    row = Row(text, 10)
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 2}).values()
    assert tree.tokens == [2, 3, 4]
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 0}).values()
    assert tree.tokens == [2]


def test_matches_that_differ_make_a_tree():
    row = Row([1, 2, 3, 1, 2, 4, 1, 2], 10)
    (tree,) = PromptLookupDrafter(2).propose({0: row}, {0: 5}, {0: 9}).values()
    assert {tuple(tree.tokens_to(node)) for node in range(len(tree))} == {(), (4,), (3,), (4, 1), (3, 1), (4, 1, 2)}
