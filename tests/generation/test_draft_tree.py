"""Draft trees: their nodes, the accepted path, and their arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.generation.drafts.draft_acceptance import accepted_path
from mlx_transmuter.generation.drafts.draft_tree import (
    DraftCounts,
    DraftTree,
    merge_continuations,
    padded_node_count,
    stack_trees,
)

SHORT_SEQUENCES = st.lists(st.integers(0, 3), max_size=30)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens_to(node)) for node in range(len(tree))}


@given(st.lists(SHORT_SEQUENCES, max_size=4), st.integers(0, 40))
def test_a_tree_has_each_prefix_of_the_continuations_once(continuations, max_nodes):
    tree = merge_continuations(9, continuations, max_nodes)
    prefixes = {tuple(tokens[:n]) for tokens in continuations for n in range(len(tokens) + 1)} | {()}
    assert paths(tree) <= prefixes
    assert len(paths(tree)) == len(tree) == min(1 + max_nodes, len(prefixes))
    assert tree.longest_path_length == 1 + max(map(len, paths(tree)))


@given(st.lists(SHORT_SEQUENCES, max_size=3), SHORT_SEQUENCES)
def test_the_accepted_path_is_the_longest_prefix_of_the_selected_tokens(continuations, selected):
    tree = merge_continuations(9, continuations, 100)
    accepted = [tree.tokens[node] for node in accepted_path(tree, selected)[1:]]
    longest = max((path for path in paths(tree) if path == tuple(selected[: len(path)])), key=len)
    assert tuple(accepted) == longest


def test_the_arrays_of_a_batch_describe_each_tree():
    first, second = merge_continuations(7, [[1, 2], [1, 3], [4]], 9), DraftTree(8)
    tokens, parents, depths, ancestor_mask = stack_trees({0: first, 2: second}, 3, 6)
    assert (tokens.dtype, ancestor_mask.dtype, ancestor_mask.shape) == (np.int32, bool, (3, 6, 6))
    assert (depths >= 0).sum(axis=1).tolist() == [5, 0, 1]
    for row, tree in ((0, first), (2, second)):
        for node in range(len(tree)):
            assert ancestor_mask[row, node].nonzero()[0].tolist() == sorted(tree.path_to(node))
            assert depths[row, node] == len(tree.path_to(node)) - 1
            assert (tokens[row, node], parents[row, node]) == (tree.tokens[node], tree.parents[node])
    assert not ancestor_mask[1].any()


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 7, 20])
def test_few_padded_sizes_fit_all_trees(max_nodes):
    sizes = {padded_node_count(nodes, max_nodes) for nodes in range(1, max_nodes + 2)}
    assert all(padded_node_count(nodes, max_nodes) >= nodes for nodes in range(1, max_nodes + 2))
    assert max(sizes) == max_nodes + 1
    assert len(sizes) <= (max_nodes + 1).bit_length() + 1


def test_draft_counts_add_up():
    counts = DraftCounts().with_pass(5, 2).with_pass(3, 3).with_pass(0, 0)
    assert counts == (3, 8, 5)
    assert counts.tokens_per_pass == pytest.approx(8 / 3)
    assert DraftCounts().tokens_per_pass == 1
