"""Speculative decoding: drafts of several tokens per row are verified in one pass of the model.

The drafts come from the row's own sequence (prompt lookup, Saxena 2023) or from a smaller model (Leviathan et al.
2023). Tokens and log-probabilities are those of plain decoding with the same seed, greedy and sampled (see
draft_acceptance). The one difference is rounding: the model sums in another order when it runs several tokens at once,
so logits within rounding of a tie may fall the other way.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import numpy as np

from mlx_transmuter.cache import CacheFullError
from mlx_transmuter.generation.batch import StepOutput
from mlx_transmuter.generation.drafts.assistant_drafts import AssistantDrafter
from mlx_transmuter.generation.drafts.draft_acceptance import DRAFTS_WITH_NAN, accepted_path, next_draft_limit
from mlx_transmuter.generation.drafts.draft_tree import DraftCounts, DraftTree, padded_node_count, stack_trees
from mlx_transmuter.generation.drafts.prompt_lookup import PromptLookupDrafter
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.row_group import RowGroup, read_selection

Drafter = AssistantDrafter | PromptLookupDrafter


def decode_speculatively(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Decodes the rows of a group, greedy or sampled, several tokens per row and pass; each pass is evaluated once.
    Each StepOutput has one token of a row, as without drafts."""
    decoding = SpeculativeDecoding(group)
    try:
        yield from decoding.steps()
    finally:
        decoding.drafter.close()
    for index, row in decoding.rows.items():
        group.batch.results[index] = row.to_result()


def _make_drafter(group: RowGroup) -> Drafter:
    assistant = group.batch.compiled.assistant
    if assistant is not None:
        return AssistantDrafter(assistant, group)
    return PromptLookupDrafter(group.batch.settings.max_matching_ngram_size)


class SpeculativeDecoding:
    """The rows of a group, the state of their processors, their drafter, and how many tokens to draft for each row."""

    def __init__(self, group: RowGroup):
        batch, max_step_tokens = group.batch, group.session.max_step_tokens
        self.group = group
        self.rows = group.make_rows()
        for row in self.rows.values():
            row.draft_counts = DraftCounts()
        self.max_draft_tokens = batch.compiled.max_draft_tokens
        if max_step_tokens:
            self.max_draft_tokens = min(self.max_draft_tokens, max_step_tokens - 1)
        self.draft_limits = dict.fromkeys(self.rows, self.max_draft_tokens)
        keys = row_random_keys(batch.seeds, group.rows_per_prompt) if batch.settings.do_sample else []
        self.state, self.fixed = group.initial_state(keys)
        self.drafter = _make_drafter(group)

    def steps(self) -> Generator[StepOutput, None, None]:
        """Yields the steps until every row has ended or the batch is cancelled."""
        selected_tokens = self._select_first_tokens()
        while selected_tokens:
            for place in range(max(map(len, selected_tokens.values()))):
                yield self._append_tokens(
                    {row: read[place] for row, read in selected_tokens.items() if place < len(read)}
                )
                if self.group.batch.cancelled:
                    return
            selected_tokens = self._run_pass({index: row for index, row in self.rows.items() if row.is_live})

    def _append_tokens(self, selected_tokens: Mapping[int, np.ndarray]) -> StepOutput:
        read_token = self.group.selection.read_token
        return self.group.batch.append_tokens(
            self.rows, {row: read_token(values) for row, values in selected_tokens.items()}
        )

    def _select_first_tokens(self) -> dict[int, np.ndarray]:
        """Returns the first new token of each row, int32 [1, 1 or 2] (see TokenSelection.select_tokens); {} if the
        batch was cancelled."""
        logits = self.group.prefill()
        if logits is None:
            return {}
        sequences = [self.rows[row].token_ids if row in self.rows else None for row in self.group.all_rows]
        read, self.state = self.group.select_and_read(logits, self.state, self.fixed, sequences)
        return {row: read[row : row + 1] for row in self.rows}

    def _run_pass(self, live: Mapping[int, Row]) -> dict[int, np.ndarray]:
        """Drafts, verifies and accepts tokens of the live rows. Returns the tokens of each row, int32 [n, 1 or
        2]: the accepted ones and one after them; {} without a live row."""
        if not live:
            return {}
        # The last token of a row is not drafted, for nothing follows it.
        max_depths = {index: row.remaining_tokens - 1 for index, row in live.items()}
        if (limits := self.group.session.draft_limits()) is not None:
            max_depths = {index: min(depth, limits[index]) for index, depth in max_depths.items()}
        trees = self.drafter.propose(live, self.draft_limits, max_depths, self.state, self.fixed)
        try:
            read, state = self._verify(live, trees)
        except CacheFullError:
            return self._decode_without_draft(live)
        if any(read[index, 0, 0] == DRAFTS_WITH_NAN for index in live):
            # A token that attends to no draft token is NaN beside one whose values are: 0 × NaN.
            self.group.accept_drafts([[] for _ in self.group.all_rows])
            return self._decode_without_draft(live)
        self.state = state
        return self._accept(live, trees, read)

    def _decode_without_draft(self, live: Mapping[int, Row]) -> dict[int, np.ndarray]:
        """Runs the last token of each live row alone, beside which no draft brings NaN, and for which a prompt cache
        without room for a draft may have room; returns the next token of each row, int32 [1, 1 or 2]."""
        group = self.group
        sequences = [live[row].token_ids if row in live else None for row in group.all_rows]
        tokens = np.array([[sequence[-1] if sequence else 0] for sequence in sequences], np.int32)
        logits = group.step(tokens, [int(row in live) for row in group.all_rows])
        read, self.state = group.select_and_read(logits, self.state, self.fixed, sequences)
        for row in live.values():
            row.draft_counts = (row.draft_counts or DraftCounts()).with_pass(0, 0)
        return {row: read[row : row + 1] for row in live}

    def _verify(self, live: Mapping[int, Row], trees: Mapping[int, DraftTree]) -> tuple[np.ndarray, ProcessorState]:
        """Runs the model over the trees and returns the selected tokens along each, int32 [rows, depth, 1 or 2], and
        the processors' state after them."""
        group, limit = self.group, self.max_draft_tokens
        nodes = padded_node_count(max(map(len, trees.values())), limit)
        depth = padded_node_count(max(tree.longest_path_length for tree in trees.values()), limit)
        drafts = stack_trees(trees, len(group.all_rows), nodes)
        arrays = self.fixed | _host_arrays_per_node(group, trees, live, nodes)
        logits = group.verify_drafts(drafts)
        selection = group.batch.compiled.draft_selection
        selected_tokens, state = selection.select_along_tree(logits, self.state, arrays, drafts, depth)
        del logits
        return read_selection(group.session, selected_tokens, state), state

    def _accept(
        self, live: Mapping[int, Row], trees: Mapping[int, DraftTree], read: np.ndarray
    ) -> dict[int, np.ndarray]:
        schedule = self.group.batch.settings.num_assistant_tokens_schedule
        paths: list[list[int]] = [[] for _ in self.group.all_rows]
        for index, tree in trees.items():
            paths[index] = path = accepted_path(tree, read[index, :, 0].tolist())
            counts = live[index].draft_counts or DraftCounts()
            live[index].draft_counts = counts.with_pass(len(tree) - 1, len(path) - 1)
            if len(tree) > 1:
                all_accepted = len(path) == tree.longest_path_length
                self.draft_limits[index] = next_draft_limit(
                    schedule, self.draft_limits[index], self.max_draft_tokens, all_accepted
                )
        self.group.accept_drafts(paths)
        return {index: read[index, : len(paths[index])] for index in trees}


def _host_arrays_per_node(
    group: RowGroup, trees: Mapping[int, DraftTree], rows: Mapping[int, Row], nodes: int
) -> ProcessorState:
    """Returns the host's arrays for the processors after each node, [rows, nodes, ...].

    So a task's processor sees sequences with draft tokens, and not only those that are accepted.
    """
    if not group.selection.host_names:
        return {}
    sequences: list[list[int] | None] = []
    for index in group.all_rows:
        tree = trees.get(index)
        drafted = [] if tree is None else [rows[index].token_ids + tree.tokens_to(node) for node in range(len(tree))]
        sequences += [*drafted, *[None] * (nodes - len(drafted))]
    arrays = group.host_inputs.arrays_for(sequences, [row for row in group.all_rows for _ in range(nodes)])
    return {name: array.reshape(len(group.all_rows), nodes, *array.shape[1:]) for name, array in arrays.items()}
