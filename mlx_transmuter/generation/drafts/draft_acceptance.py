"""Which draft tokens are accepted, and how many are drafted next: a draft token is accepted while it equals the token
that plain decoding selects in its place.

This is not the rejection sampling of Leviathan et al. 2023, whose tokens only have the right distribution: each token
is selected from the true logits, with the processors' state and the random key that it has without drafts. So tokens,
log-probabilities and seeds mean the same with and without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.drafts.draft_tree import DraftArrays, DraftTree
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.token_selection import TokenSelection
from mlx_transmuter.ops.compiled_function import CompiledFunction

# Stands in place of a token: the pass must run again without draft tokens. No ScoreFault has this value.
DRAFTS_WITH_NAN = -4


class DraftSelection:
    """The selection of tokens along the draft trees of a batch, compiled once per shape and thread."""

    def __init__(self, selection: TokenSelection):
        self.selection = selection
        self._compiled_select = CompiledFunction(self._select_along_tree)

    def select_along_tree(
        self, logits: mx.array, state: ProcessorState, arrays: ProcessorState, drafts: DraftArrays, depth: int
    ) -> tuple[mx.array, ProcessorState]:
        """Returns the tokens that plain decoding selects after node 0 of each row's tree and after the draft tokens
        that it selects too, and the state after them.

        int32 [rows, depth, 1 or 2]: for each node of the path what `select_tokens` packs; after the path's end it is
        unspecified. DRAFTS_WITH_NAN stands in place of a row's first token where the logits after node 0 have NaN in a
        pass of several nodes: it may be that of draft tokens. logits: [rows, nodes, vocab]. arrays: the fixed arrays
        [rows, ...], and those that the host computed for each node, [rows, nodes, ...]. depth: the nodes of the longest
        path.
        """
        tree = mx.array(np.stack([drafts.tokens, drafts.parents]))
        return self._compiled_select(logits, state, arrays, tree, depth)

    def _select_along_tree(
        self, logits: mx.array, state: ProcessorState, arrays: ProcessorState, tree: mx.array, depth: int
    ) -> tuple[mx.array, ProcessorState]:
        tokens, parents, host_names = tree[0], tree[1], self.selection.host_names
        rows = mx.arange(logits.shape[0])
        node, on_path = mx.zeros(rows.shape, mx.int32), mx.ones(rows.shape, mx.bool_)
        path = []
        for _ in range(depth):
            at_node = {name: array[rows, node] if name in host_names else array for name, array in arrays.items()}
            selected_tokens, after = self.selection.trace_selection(logits[rows, node], state, at_node)
            # The state advances along the path alone: it uses as many keys, and sees as many tokens, as are
            # selected.
            state = {name: _where_rows(on_path, after[name], array) for name, array in state.items()}
            if not path and logits.shape[1] > 1:
                has_nan = mx.any(mx.isnan(logits[:, 0]), axis=-1, keepdims=True)
                selected_tokens = mx.where(has_nan, DRAFTS_WITH_NAN, selected_tokens)
            path.append(selected_tokens)
            matches = (tokens == selected_tokens[:, :1]) & (parents == node[:, None])
            on_path = on_path & mx.any(matches, axis=-1)
            node = mx.where(on_path, mx.argmax(matches, axis=-1).astype(mx.int32), node)
        return mx.stack(path, axis=1), state


def accepted_path(tree: DraftTree, selected_tokens: Sequence[int]) -> list[int]:
    """Returns the nodes from 0 along the draft tokens that were selected too; selected_tokens[d] is the selection after
    the path's node d."""
    path = [0]
    for token in selected_tokens:
        node = tree.child(path[-1], token)
        if node is None:
            break
        path.append(node)
    return path


def next_draft_limit(schedule: str, limit: int, max_draft_tokens: int, all_accepted: bool) -> int:
    """Returns how many tokens to draft in the next pass, after one that drafted up to `limit`.

    schedule: num_assistant_tokens_schedule, constant or heuristic: two more after all of the longest path were
    accepted, else one fewer (AssistedCandidateGenerator.update_candidate_strategy of transformers).
    """
    if schedule == "constant":
        return limit
    return min(limit + 2, max_draft_tokens) if all_accepted else max(limit - 1, 1)


def _where_rows(condition: mx.array, yes: mx.array, no: mx.array) -> mx.array:
    """Returns yes in the rows [rows] for which the condition is true, no in the others."""
    return mx.where(condition.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
