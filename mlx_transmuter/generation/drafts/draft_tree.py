"""Drafts of a row's next tokens: a tree after its last token, and the arrays in which a pass verifies a batch of
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

NO_PARENT = -1
# The most continuations in one tree.
MAX_BRANCHES = 3


class DraftTree:
    """The last token of a row, node 0, and draft tokens after it; a node's parent comes before it.

    Node 0 is certain, but its keys and values are not in the cache yet, so that a pass runs it too.
    """

    def __init__(self, last_token: int):
        self.tokens, self.parents, self.depths = [last_token], [NO_PARENT], [0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest_path_length(self) -> int:
        """The most tokens that a pass can bring: one after each node of the longest path."""
        return 1 + max(self.depths)

    def child(self, parent: int, token: int) -> int | None:
        """Returns the node of `token` after `parent`; None where there is none."""
        return self._children[parent].get(token)

    def add(self, parent: int, token: int) -> int:
        """Returns the node of `token` after `parent`, a new one where there was none."""
        node = self.child(parent, token)
        if node is None:
            node = self._children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self._children.append({})
        return node

    def path_to(self, node: int) -> list[int]:
        """Returns the nodes from 0 to `node`."""
        path = []
        while node != NO_PARENT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tokens_to(self, node: int) -> list[int]:
        """Returns the draft tokens from after node 0 to `node`."""
        return [self.tokens[at] for at in self.path_to(node)[1:]]


class DraftArrays(NamedTuple):
    """The draft trees of a batch as arrays, -1 where there is no node (tokens: 0).

    tokens, parents, depths: int32 [rows, nodes]. ancestor_mask: bool [rows, nodes, nodes], whether a node attends to
    another: to itself and to those before it on its path.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    ancestor_mask: np.ndarray


class DraftCounts(NamedTuple):
    """The passes of speculative decoding for a row, the draft tokens that they verified, and those that were accepted.

    Each pass brings one token and the draft tokens that it accepts.
    """

    passes: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """The tokens that a pass brought, on average."""
        return 1 + self.accepted / max(self.passes, 1)

    def with_pass(self, proposed: int, accepted: int) -> DraftCounts:
        """Returns the counts with one more pass."""
        return DraftCounts(self.passes + 1, self.proposed + proposed, self.accepted + accepted)


def slots_with_drafts(row_tokens: int, new_tokens: int, max_draft_tokens: int, block_size: int) -> int:
    """Returns the slots of a row of row_tokens tokens, new_tokens of them new, and of its drafts in each pass.

    Drafts have slots of their own, in whole blocks. No pass stores a row's last token, nor more draft tokens, in each
    of MAX_BRANCHES, than may follow.
    """
    nodes = 1 + min(max_draft_tokens, MAX_BRANCHES * max(0, new_tokens - 2))
    return (-(-(row_tokens - 1) // block_size) + -(-nodes // block_size)) * block_size


def merge_continuations(last_token: int, continuations: Sequence[Sequence[int]], max_nodes: int) -> DraftTree:
    """Returns a tree of at most max_nodes draft tokens, in which continuations share their common prefixes.

    They grow in turns, a token each, so that each gets its share where they differ at once, and the first gets all of
    it where they are equal.
    """
    tree = DraftTree(last_token)
    nodes = [0] * len(continuations)
    for place in range(max(map(len, continuations), default=0)):
        for index, tokens in enumerate(continuations):
            if place < len(tokens) and len(tree) <= max_nodes:
                nodes[index] = tree.add(nodes[index], tokens[place])
    return tree


def padded_node_count(nodes: int, max_draft_tokens: int) -> int:
    """Returns the nodes of a pass for trees of so many: a power of two, or 1 + max_draft_tokens, so that few shapes are
    compiled."""
    return min(1 << (nodes - 1).bit_length(), max(nodes, 1 + max_draft_tokens))


def stack_trees(trees: Mapping[int, DraftTree], rows: int, nodes: int) -> DraftArrays:
    """Returns the trees, row -> tree, as arrays of so many rows and nodes. The padding of a row has its tree's first
    token, so that it brings no value that is not the row's."""
    tokens = np.zeros((rows, nodes), np.int32)
    parents, depths = np.full((2, rows, nodes), NO_PARENT, np.int32)
    ancestor_mask = np.zeros((rows, nodes, nodes), bool)
    for row, tree in trees.items():
        count = len(tree)
        tokens[row], tokens[row, :count] = tree.tokens[0], tree.tokens
        parents[row, :count], depths[row, :count] = tree.parents, tree.depths
        for node in range(count):
            ancestor_mask[row, node, tree.path_to(node)] = True
    return DraftArrays(tokens, parents, depths, ancestor_mask)
