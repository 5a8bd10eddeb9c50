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

ProcessorState = dict[str, mx.array]

FIXED_NAMES = ("start", "end", "source")
NO_TOKEN = -1


def build_state(
    state_names: Iterable[str],
    prompts: Sequence[Sequence[int]],
    encoder_input_ids: Sequence[Sequence[int]],
    requested_max_lengths: Sequence[int],
    keys: Sequence[mx.array],
    vocab_size: int,
    recent_count: int,
) -> ProcessorState:
    """The arrays named in reads, for rows of prompt tokens; ends are their max_length, seeds their keys."""
    lengths = [len(row) for row in prompts]
    makers = {
        "length": lambda: mx.array(lengths, dtype=mx.int32),
        "start": lambda: mx.array(lengths, dtype=mx.int32),
        "end": lambda: mx.array(list(requested_max_lengths), dtype=mx.int32),
        "seen": lambda: token_mask(prompts, vocab_size),
        "source": lambda: token_mask(encoder_input_ids, vocab_size),
        "recent": lambda: mx.array([_last_tokens(row, recent_count) for row in prompts], dtype=mx.int32),
        "keys": lambda: mx.stack(list(keys)),
    }
    return {name: make() for name, make in makers.items() if name in state_names}


def advance_state(state: ProcessorState, tokens: mx.array) -> ProcessorState:
    """The state after one more token of each row, int32 [rows]."""
    after = dict(state)
    if "length" in state:
        after["length"] = state["length"] + 1
    if "seen" in state:
        after["seen"] = mx.put_along_axis(state["seen"], tokens[:, None], mx.array(True), axis=1)
    if "recent" in state:
        after["recent"] = mx.concatenate([state["recent"][:, 1:], tokens[:, None]], axis=1)
    return after


def gather_state(state: ProcessorState, parents: mx.array) -> ProcessorState:
    """The state in which row r has that of row parents[r], int32 [rows]; keys stay with their row."""
    return {name: array if name == "keys" else array[parents] for name, array in state.items()}


def token_mask(rows: Sequence[Sequence[int]], vocab_size: int) -> mx.array:
    """bool [rows, vocab]: which tokens each row holds."""
    longest = max(map(len, rows), default=0)
    ids = np.full((len(rows), longest), vocab_size, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return mask_from_ids(mx.array(ids), vocab_size)


def mask_from_ids(ids: mx.array, vocab_size: int) -> mx.array:
    """bool [rows, vocab] from ids int32 [rows, n]; an id of vocab stands for none."""
    sets = mx.zeros((ids.shape[0], vocab_size + 1), dtype=mx.bool_)
    return mx.put_along_axis(sets, ids, mx.array(True), axis=1)[:, :vocab_size]


def pad_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """int32 [rows, n]: lists of ids filled up with vocab; n is a power of two, so that few shapes compile."""
    longest = max(map(len, rows), default=0)
    ids = np.full((len(rows), 1 << max(longest - 1, 0).bit_length()), vocab_size, np.int32)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return ids


def _last_tokens(tokens: Sequence[int], count: int) -> list[int]:
    kept = list(tokens[-count:]) if count else []
    return [NO_TOKEN] * (count - len(kept)) + kept
