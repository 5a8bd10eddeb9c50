"""Speculative decoding: guesses of several tokens, checked in one pass of the model. Texts are those without it.

The guesses come from the row's own text (prompt lookup, Saxena 2023) or from a smaller model (Leviathan et al. 2023).
A guess is kept while it equals the token that plain decoding chooses there, from the true logits, the processors' state
and the row's random key: so tokens and log-probabilities are those of plain decoding with the same seed, greedy and
sampled, and not only drawn from the same distribution. What stays is rounding: the model sums in another order when it
runs several tokens at once, so logits within rounding of a tie may fall the other way.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import StepOutput
from mlx_transmuter.generation.drafts.assistant_drafts import AssistantDrafter
from mlx_transmuter.generation.drafts.draft_tree import DraftCounts, DraftTree, padded_node_count, stack_trees
from mlx_transmuter.generation.drafts.prompt_lookup import PromptLookupDrafter
from mlx_transmuter.generation.logits.processor_state import ProcessorState
from mlx_transmuter.generation.logits.token_selection import row_random_keys
from mlx_transmuter.generation.row import Row
from mlx_transmuter.generation.row_group import RowGroup


def decode_speculatively(group: RowGroup) -> Generator[StepOutput, None, None]:
    """Greedy choice and sampling, several tokens per row and pass; each pass is evaluated once. Steps hold one token of
    a row, as without guesses."""
    rows = group.make_rows()
    for text in rows.values():
        text.draft_counts = DraftCounts()
    guessing = _make_drafter(group)
    try:
        yield from _decode_passes(group, rows, guessing)
    finally:
        guessing.close()
    for row, text in rows.items():
        group.batch.results[row] = text.to_result()


def _make_drafter(group: RowGroup) -> AssistantDrafter | PromptLookupDrafter:
    settings, assistant = group.batch.settings, group.batch.compiled.assistant
    if assistant is not None:
        return AssistantDrafter(assistant, group)
    return PromptLookupDrafter(settings.max_matching_ngram_size, settings.eos_token_id)


def _decode_passes(
    group: RowGroup, rows: Mapping[int, Row], drafter: AssistantDrafter | PromptLookupDrafter
) -> Generator[StepOutput, None, None]:
    batch, selection, largest = group.batch, group.selection, group.session.max_step_tokens
    guesses = min(batch.compiled.max_draft_tokens, largest - 1) if largest else batch.compiled.max_draft_tokens
    logits = group.prefill()
    if logits is None:
        return
    state, fixed = group.initial_state(
        row_random_keys(batch.seeds, group.rows_per_prompt) if batch.settings.do_sample else []
    )
    texts = [rows[row].sequence if row in rows else None for row in group.all_rows]
    packed, state = selection.select_tokens(logits, state, fixed | group.host_inputs.arrays_for(texts))
    del logits
    group.session.evaluate(packed, *state.values())
    first = np.array(packed)
    chosen = {row: first[row : row + 1] for row in rows}
    most = dict.fromkeys(rows, guesses)
    while True:
        for place in range(max(map(len, chosen.values()))):
            here = {row: tokens[place] for row, tokens in chosen.items() if place < len(tokens)}
            yield batch.append_tokens(rows, {row: _unpack_token(values) for row, values in here.items()})
            if batch.cancelled:
                return
        live = {row: text for row, text in rows.items() if text.is_live}
        if not live:
            return
        # The last token of a text is no one's guess, for nothing follows it.
        deepest = {row: text.remaining_tokens - 1 for row, text in live.items()}
        trees = drafter.propose(live, most, deepest, state, fixed)
        nodes = padded_node_count(max(map(len, trees.values())), guesses)
        depth = padded_node_count(max(tree.longest_path_length for tree in trees.values()), guesses)
        tokens, parents, depths, sees = stack_trees(trees, len(group.all_rows), nodes)
        given = _host_arrays_per_node(group, trees, live, nodes)
        logits = group.verify_drafts(tokens, sees, depths)
        packed, state = selection.select_along_tree(
            logits, state, fixed, given, mx.array(tokens), mx.array(parents), depth
        )
        del logits
        group.session.evaluate(packed, *state.values())
        read = np.array(packed)
        paths: list[list[int]] = [[] for _ in group.all_rows]
        for row, tree in trees.items():
            paths[row] = path = tree.accepted_path(read[row, :, 0].tolist())
            chosen[row] = read[row, : len(path)]
            live[row].draft_counts = (live[row].draft_counts or DraftCounts()).with_pass(len(tree) - 1, len(path) - 1)
            if batch.settings.num_assistant_tokens_schedule != "constant" and len(tree) > 1:
                most[row] = (
                    min(most[row] + 2, guesses) if len(path) == tree.longest_path_length else max(most[row] - 1, 1)
                )
        chosen = {row: chosen[row] for row in trees}
        group.accept_drafts(paths)


def _host_arrays_per_node(
    group: RowGroup, trees: Mapping[int, DraftTree], rows: Mapping[int, Row], nodes: int
) -> ProcessorState:
    """What the host gives the processors after each node, arrays [rows, nodes, ...].

    A processor of a task so sees texts that the guesses would make, and not only those that come true.
    """
    if not group.selection.host_names:
        return {}
    texts: list[list[int] | None] = []
    for row in group.all_rows:
        tree = trees.get(row)
        known = [] if tree is None else [tree.tokens[node] for node in range(len(tree))]
        found = [] if tree is None else [
            rows[row].sequence + [known[step] for step in tree.path_to(node)[1:]] for node in range(len(tree))
        ]  # fmt: skip
        texts += [*found, *[None] * (nodes - len(found))]
    arrays = group.host_inputs.arrays_for(texts, [row for row in group.all_rows for _ in range(nodes)])
    return {name: array.reshape(len(group.all_rows), nodes, *array.shape[1:]) for name, array in arrays.items()}


def _unpack_token(values: np.ndarray) -> tuple[int, float | None]:
    """The token, and its log-probability where it is there, of what the selection packed, int32 [1 or 2]."""
    return int(values[0]), float(values[1:].view(np.float32)[0]) if len(values) > 1 else None
