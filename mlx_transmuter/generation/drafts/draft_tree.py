"""Guesses of a row's next tokens: a tree after its last token, and the arrays in which a pass takes a batch of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

NO_PARENT = -1
# The most continuations in one tree.
MAX_BRANCHES = 3


class DraftTree:
    """The last token of a row, node 0, and guesses of what follows it; a node's parent comes before it.

    Only node 0 is known to be right: its keys and values are not in the cache yet, so that a pass runs it too.
    """

    def __init__(self, last: int):
        self.tokens, self.parents, self.depths = [last], [NO_PARENT], [0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest_path_length(self) -> int:
        """How many tokens a pass can bring: one after each node of the longest path."""
        return 1 + max(self.depths)

    def add(self, parent: int, token: int) -> int:
        """The node of `token` after `parent`, a new one where there was none."""
        node = self._children[parent].get(token)
        if node is None:
            node = self._children[parent][token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self._children.append({})
        return node

    def path_to(self, node: int) -> list[int]:
        """The nodes from 0 to `node`."""
        found = []
        while node != NO_PARENT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def accepted_path(self, selected_tokens: Sequence[int]) -> list[int]:
        """The path of the guesses that plain decoding chooses too; chosen[d] is its choice after the path's node d."""
        path = [0]
        for token in selected_tokens:
            node = self._children[path[-1]].get(token)
            if node is None:
                break
            path.append(node)
        return path


class DraftCounts(NamedTuple):
    """What guessing brought a text: the passes of the model, the guesses that they checked, and those that were kept.

    Each pass brings a token and the guesses it keeps.
    """

    passes: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass brought, on average."""
        return 1 + self.accepted / max(self.passes, 1)

    def with_pass(self, proposed: int, accepted: int) -> DraftCounts:
        """With one pass more."""
        return DraftCounts(self.passes + 1, self.proposed + proposed, self.accepted + accepted)


def slots_with_drafts(row_tokens: int, new_tokens: int, max_draft_tokens: int, block_size: int) -> int:
    """The tokens that a row needs room for: its own, `size` of which `new` are new, and up to so many guesses a pass.

    Guesses that are not kept have slots of their own, whole blocks. No pass stores a text's last token, nor guesses
    more of it, in each of BRANCHES, than may follow.
    """
    nodes = 1 + min(max_draft_tokens, MAX_BRANCHES * max(0, new_tokens - 2))
    return (-(-(row_tokens - 1) // block_size) + -(-nodes // block_size)) * block_size


def merge_continuations(last: int, continuations: Sequence[Sequence[int]], max_nodes: int) -> DraftTree:
    """The tree of `most` guesses at most, in which continuations share what they begin with.

    They grow in turns, a token each, so that each has its part where they differ at once, and the first has all of it
    where they are one.
    """
    tree = DraftTree(last)
    nodes = [0] * len(continuations)
    for place in range(max(map(len, continuations), default=0)):
        for which, tokens in enumerate(continuations):
            if place < len(tokens) and len(tree) <= max_nodes:
                nodes[which] = tree.add(nodes[which], tokens[place])
    return tree


def padded_node_count(nodes: int, max_nodes: int) -> int:
    """The nodes of a pass for trees of that many: powers of two, and 1 + most, so that few shapes are compiled."""
    return min(1 << (nodes - 1).bit_length(), max(nodes, 1 + max_nodes))


def stack_trees(
    trees: Mapping[int, DraftTree], rows: int, nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """tokens, parents, depths int32 [rows, nodes], -1 where there is no node (tokens: 0), and sees bool [rows, nodes,
    nodes]: whether a node sees another, one of its path."""
    tokens = np.zeros((rows, nodes), np.int32)
    parents, depths = np.full((2, rows, nodes), NO_PARENT, np.int32)
    sees = np.zeros((rows, nodes, nodes), bool)
    for row, tree in trees.items():
        count = len(tree)
        tokens[row, :count], parents[row, :count], depths[row, :count] = tree.tokens, tree.parents, tree.depths
        for node in range(count):
            sees[row, node, tree.path_to(node)] = True
    return tokens, parents, depths, sees
