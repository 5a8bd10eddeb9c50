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

from mlx_transmuter.generation.assistant import AssistantRun
from mlx_transmuter.generation.batch import Step
from mlx_transmuter.generation.group import Group
from mlx_transmuter.generation.guesses import Guesses, Tree, size, stacked
from mlx_transmuter.generation.lookup import PromptLookup
from mlx_transmuter.generation.rows import Row
from mlx_transmuter.generation.selection import row_keys
from mlx_transmuter.generation.state import State


def speculate(group: Group) -> Generator[Step, None, None]:
    """Greedy choice and sampling, several tokens per row and pass; each pass is evaluated once. Steps hold one token of
    a row, as without guesses."""
    rows = group.texts()
    for text in rows.values():
        text.guesses = Guesses()
    guessing = _proposer(group)
    try:
        yield from _passes(group, rows, guessing)
    finally:
        guessing.close()
    for row, text in rows.items():
        group.batch.results[row] = text.result()


def _proposer(group: Group) -> AssistantRun | PromptLookup:
    settings, assistant = group.batch.settings, group.batch.gen.assistant
    if assistant is not None:
        return AssistantRun(assistant, group)
    return PromptLookup(settings.max_matching_ngram_size, settings.eos_token_id)


def _passes(
    group: Group, rows: Mapping[int, Row], guessing: AssistantRun | PromptLookup
) -> Generator[Step, None, None]:
    batch, selection, largest = group.batch, group.selection, group.run.largest
    guesses = min(batch.gen.guesses, largest - 1) if largest else batch.gen.guesses
    logits = group.prefill()
    if logits is None:
        return
    state, fixed = group.state(row_keys(batch.seeds, group.width) if batch.settings.do_sample else [])
    texts = [rows[row].text if row in rows else None for row in group.all]
    packed, state = selection.tokens(logits, state, fixed | group.host.arrays(texts))
    del logits
    group.run.evaluate(packed, *state.values())
    first = np.array(packed)
    chosen = {row: first[row : row + 1] for row in rows}
    most = dict.fromkeys(rows, guesses)
    while True:
        for place in range(max(map(len, chosen.values()))):
            here = {row: tokens[place] for row, tokens in chosen.items() if place < len(tokens)}
            yield batch.accept(rows, {row: _read(values) for row, values in here.items()})
            if batch.cancelled:
                return
        live = {row: text for row, text in rows.items() if text.live}
        if not live:
            return
        # The last token of a text is no one's guess, for nothing follows it.
        deepest = {row: text.room - 1 for row, text in live.items()}
        trees = guessing.propose(live, most, deepest, state, fixed)
        nodes = size(max(map(len, trees.values())), guesses)
        depth = size(max(tree.depth for tree in trees.values()), guesses)
        tokens, parents, depths, sees = stacked(trees, len(group.all), nodes)
        given = _given(group, trees, live, nodes)
        logits = group.guess(tokens, sees, depths)
        packed, state = selection.path(logits, state, fixed, given, mx.array(tokens), mx.array(parents), depth)
        del logits
        group.run.evaluate(packed, *state.values())
        read = np.array(packed)
        paths: list[list[int]] = [[] for _ in group.all]
        for row, tree in trees.items():
            paths[row] = path = tree.kept(read[row, :, 0].tolist())
            chosen[row] = read[row, : len(path)]
            live[row].guesses = (live[row].guesses or Guesses()).after(len(tree) - 1, len(path) - 1)
            if batch.settings.num_assistant_tokens_schedule != "constant" and len(tree) > 1:
                most[row] = min(most[row] + 2, guesses) if len(path) == tree.depth else max(most[row] - 1, 1)
        chosen = {row: chosen[row] for row in trees}
        group.keep(paths)


def _given(group: Group, trees: Mapping[int, Tree], rows: Mapping[int, Row], nodes: int) -> State:
    """What the host gives the processors after each node, arrays [rows, nodes, ...].

    A processor of a task so sees texts that the guesses would make, and not only those that come true.
    """
    if not group.selection.host:
        return {}
    texts: list[list[int] | None] = []
    for row in group.all:
        tree = trees.get(row)
        known = [] if tree is None else [tree.tokens[node] for node in range(len(tree))]
        found = [] if tree is None else [
            rows[row].text + [known[step] for step in tree.path(node)[1:]] for node in range(len(tree))
        ]  # fmt: skip
        texts += [*found, *[None] * (nodes - len(found))]
    arrays = group.host.arrays(texts, [row for row in group.all for _ in range(nodes)])
    return {name: array.reshape(len(group.all), nodes, *array.shape[1:]) for name, array in arrays.items()}


def _read(values: np.ndarray) -> tuple[int, float | None]:
    """The token, and its log-probability where it is there, of what the selection packed, int32 [1 or 2]."""
    return int(values[0]), float(values[1:].view(np.float32)[0]) if len(values) > 1 else None
