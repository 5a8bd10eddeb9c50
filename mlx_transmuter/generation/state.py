"""What the processors know of the rows, on the device: nothing of vocabulary size crosses from the host.

A State is a dict of arrays, one entry per row. The compiled selection moves it on with each new token; beam search
first takes each row from its parent.

- `length` int32 [rows]: tokens of the row, its prompt counted
- `seen` bool [rows, vocab]: the tokens that the row has
- `recent` int32 [rows, n]: its last tokens, the newest last, -1 before the first
- `keys` uint32 [rows, 2]: the key of each row's sampling

Fixed from the prompt on: `start` int32 [rows], tokens of the prompt; `end` int32 [rows], its max_length; `source` bool
[rows, vocab], the tokens of the encoder or of the prompt. Given anew by the host for each token: `banned` int32 [rows,
n], ids to remove, filled up with the size of the vocabulary; `custom`, one array per processor of the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

State = dict[str, mx.array]

FIXED = ("start", "end", "source")
NO_TOKEN = -1


def first_state(
    reads: Iterable[str],
    rows: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]],
    ends: Sequence[int],
    seeds: Sequence[mx.array],
    vocab: int,
    recent: int,
) -> State:
    """The arrays named in reads, for rows of prompt tokens; ends are their max_length, seeds their keys."""
    lengths = [len(row) for row in rows]
    makers = {
        "length": lambda: mx.array(lengths, dtype=mx.int32),
        "start": lambda: mx.array(lengths, dtype=mx.int32),
        "end": lambda: mx.array(list(ends), dtype=mx.int32),
        "seen": lambda: token_sets(rows, vocab),
        "source": lambda: token_sets(sources, vocab),
        "recent": lambda: mx.array([_last(row, recent) for row in rows], dtype=mx.int32),
        "keys": lambda: mx.stack(list(seeds)),
    }
    return {name: make() for name, make in makers.items() if name in reads}


def moved(state: State, tokens: mx.array) -> State:
    """The state after one more token of each row, int32 [rows]."""
    after = dict(state)
    if "length" in state:
        after["length"] = state["length"] + 1
    if "seen" in state:
        after["seen"] = mx.put_along_axis(state["seen"], tokens[:, None], mx.array(True), axis=1)
    if "recent" in state:
        after["recent"] = mx.concatenate([state["recent"][:, 1:], tokens[:, None]], axis=1)
    return after


def inherited(state: State, parents: mx.array) -> State:
    """The state in which row r has that of row parents[r], int32 [rows]; keys stay with their row."""
    return {name: array if name == "keys" else array[parents] for name, array in state.items()}


def token_sets(rows: Sequence[Sequence[int]], vocab: int) -> mx.array:
    """bool [rows, vocab]: which tokens each row holds."""
    longest = max(map(len, rows), default=0)
    ids = np.full((len(rows), longest), vocab, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return members(mx.array(ids), vocab)


def members(ids: mx.array, vocab: int) -> mx.array:
    """bool [rows, vocab] from ids int32 [rows, n]; an id of vocab stands for none."""
    sets = mx.zeros((ids.shape[0], vocab + 1), dtype=mx.bool_)
    return mx.put_along_axis(sets, ids, mx.array(True), axis=1)[:, :vocab]


def padded_ids(rows: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """int32 [rows, n]: lists of ids filled up with vocab; n is a power of two, so that few shapes compile."""
    longest = max(map(len, rows), default=0)
    ids = np.full((len(rows), 1 << max(longest - 1, 0).bit_length()), vocab, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return ids


def _last(tokens: Sequence[int], count: int) -> list[int]:
    kept = list(tokens[-count:]) if count else []
    return [NO_TOKEN] * (count - len(kept)) + kept
