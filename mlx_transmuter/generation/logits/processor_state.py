"""The state of the logits processors: what they read of the rows, on the device. Nothing of vocabulary size crosses
from the host.

A ProcessorState is a dict of arrays, one entry per row. The compiled selection advances it with each new token; beam
search first gathers each row from its parent.

- `length` int32 [rows]: the tokens of the row, prompt included
- `seen_tokens` bool [rows, vocab]: the tokens that the row has
- `recent_tokens` int32 [rows, n]: its last tokens, the newest last, NO_TOKEN before the first
- `random_keys` uint32 [rows, 2]: the key of each row's sampling

Fixed from the prompt on: `prompt_length` int32 [rows]; `max_length` int32 [rows]; `encoder_tokens` bool [rows, vocab],
the tokens of the encoder or of the prompt. Computed by the host before each token: `banned_ids` int32 [rows, n], the
ids to remove, padded with the size of the vocabulary; `custom.<i>`, one array per processor of the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

ProcessorState = dict[str, mx.array]

FIXED_NAMES = ("prompt_length", "max_length", "encoder_tokens")
NO_TOKEN = -1


class ProcessorInputs(NamedTuple):
    """What the processors' state is built from, one entry per row.

    encoder_input_ids: the tokens that the encoder_ settings read. requested_max_lengths: max_length of the settings.
    keys: of sampling, per row, or per prompt under beam search; empty without sampling.
    """

    prompts: Sequence[Sequence[int]]
    encoder_input_ids: Sequence[Sequence[int]]
    requested_max_lengths: Sequence[int]
    keys: Sequence[mx.array] = ()


def build_state(
    state_names: Iterable[str], inputs: ProcessorInputs, vocab_size: int, recent_count: int
) -> ProcessorState:
    """Returns the arrays named in state_names after the prompts; recent_count is the n of `recent_tokens`."""
    lengths = [len(prompt) for prompt in inputs.prompts]
    recent = [prompt[-recent_count:] if recent_count else [] for prompt in inputs.prompts]
    builders = {
        "length": lambda: mx.array(lengths, dtype=mx.int32),
        "prompt_length": lambda: mx.array(lengths, dtype=mx.int32),
        "max_length": lambda: mx.array(list(inputs.requested_max_lengths), dtype=mx.int32),
        "seen_tokens": lambda: token_mask(inputs.prompts, vocab_size),
        "encoder_tokens": lambda: token_mask(inputs.encoder_input_ids, vocab_size),
        "recent_tokens": lambda: mx.array(pad_left(recent, recent_count, NO_TOKEN)),
        "random_keys": lambda: mx.stack(list(inputs.keys)),
    }
    return {name: build() for name, build in builders.items() if name in state_names}


def advance_state(state: ProcessorState, tokens: mx.array) -> ProcessorState:
    """Returns the state after one more token of each row, int32 [rows]."""
    after = dict(state)
    if "length" in state:
        after["length"] = state["length"] + 1
    if "seen_tokens" in state:
        after["seen_tokens"] = mx.put_along_axis(state["seen_tokens"], tokens[:, None], mx.array(True), axis=1)
    if "recent_tokens" in state:
        after["recent_tokens"] = mx.concatenate([state["recent_tokens"][:, 1:], tokens[:, None]], axis=1)
    return after


def gather_state(state: ProcessorState, parents: mx.array) -> ProcessorState:
    """Returns the state in which row r has that of row parents[r], int32 [rows]; random keys stay with their row."""
    return {name: array if name == "random_keys" else array[parents] for name, array in state.items()}


def token_mask(rows: Sequence[Sequence[int]], vocab_size: int) -> mx.array:
    """Returns bool [rows, vocab]: which tokens each row has. Ids outside the vocabulary count for nothing."""
    inside = [[token for token in tokens if 0 <= token < vocab_size] for tokens in rows]
    return mask_from_ids(mx.array(pad_right(inside, max(map(len, inside), default=0), vocab_size)), vocab_size)


def mask_from_ids(ids: mx.array, vocab_size: int) -> mx.array:
    """Returns bool [rows, vocab] from ids int32 [rows, n]; an id of vocab_size is padding."""
    marks = mx.zeros((ids.shape[0], vocab_size + 1), dtype=mx.bool_)
    return mx.put_along_axis(marks, ids, mx.array(True), axis=1)[:, :vocab_size]


def pad_to_power_of_two(rows: Sequence[Sequence[int]], padding: int) -> np.ndarray:
    """Returns the rows padded on the right as int32 [rows, n]; n is a power of two, so that few shapes are compiled."""
    longest = max(map(len, rows), default=0)
    return pad_right(rows, 1 << max(longest - 1, 0).bit_length(), padding)


def pad_right(rows: Sequence[Sequence[int]], length: int, padding: int) -> np.ndarray:
    """Returns int32 [rows, length]: the rows, with padding after their last token."""
    return _pad(rows, [0] * len(rows), length, padding)


def pad_left(rows: Sequence[Sequence[int]], length: int, padding: int) -> np.ndarray:
    """Returns int32 [rows, length]: the rows, with padding before their first token."""
    return _pad(rows, [length - len(tokens) for tokens in rows], length, padding)


def _pad(rows: Sequence[Sequence[int]], starts: Sequence[int], length: int, padding: int) -> np.ndarray:
    padded = np.full((len(rows), length), padding, np.int32)
    for row, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
        padded[row, start : start + len(tokens)] = tokens
    return padded
