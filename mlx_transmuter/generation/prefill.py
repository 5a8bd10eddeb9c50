"""Prefill: the prompts of a group of rows run in chunks, or packed one after another into rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np

from mlx_transmuter.generation.batch import Batch
from mlx_transmuter.runtime.prefill_schedule import PackedPrefillRow, prefill_chunks
from mlx_transmuter.runtime.session import Session


def prefill_in_chunks(
    session: Session,
    step: Callable[[np.ndarray, list[int]], mx.array],
    sequences: Mapping[int, Sequence[int]],
    batch: Batch,
) -> mx.array | None:
    """Returns the logits [rows, vocab] after the tokens sequences[r] of some rows; None if the batch was cancelled.

    step: runs tokens int32 [rows, n], of which row r has counts[r], and returns the logits. Of the logits only those of
    a row's last token are kept, from the chunk that has it.
    """
    rows = range(batch.row_count)
    start, last = 0, None
    longest, max_chunk = max(map(len, sequences.values())), max_chunk_tokens(session, batch)
    lengths, decoder = session.lengths.tolist(), session.decoder
    session.announce_prompts([lengths[row] + len(sequences.get(row, ())) for row in rows], max_chunk)
    for size in prefill_chunks(longest, max_chunk, decoder.prompt_mode, padded=decoder.pads_last_chunk):
        if batch.cancelled:
            return None
        tokens = np.zeros((len(rows), size), np.int32)
        counts = [0] * len(rows)
        for row, sequence in sequences.items():
            chunk = sequence[start : start + size]
            tokens[row, : len(chunk)] = chunk
            counts[row] = len(chunk)
        start += size
        ends = [counts[row] > 0 and len(sequences[row]) <= start for row in rows]
        logits = step(tokens, counts)
        if any(ends):
            last = _keep_ends(last, ends, logits)
        del logits
        session.evaluate(*([] if last is None else [last]))
    assert last is not None  # each sequence has tokens
    return last


def prefill_packed(
    session: Session,
    prompts: Mapping[int, Sequence[int]],
    packed_rows: Sequence[PackedPrefillRow],
    batch: Batch,
) -> mx.array | None:
    """Returns the logits [rows, vocab] after the prompts, one step for each packed row; None if the batch was
    cancelled.

    A value that is NaN or infinite, in the weighted sum of a token that does not attend to it, has a weight of 0, and
    0 × NaN is NaN: one such prompt makes NaN of all the logits of its step. They all run again then, each alone.
    """
    last, steps = None, list(packed_rows)
    while steps:
        if batch.cancelled:
            return None
        members, size = steps.pop(0)
        ends = [row in members for row in range(batch.row_count)]
        logits = session.prefill_packed([prompts[row] if ends[row] else [] for row in range(batch.row_count)], size)
        has_nan = mx.any(mx.isnan(logits), axis=-1)
        last = _keep_ends(last, ends, logits)
        del logits
        session.evaluate(last, has_nan)
        if len(members) > 1 and np.array(has_nan)[members].any():
            session.truncate(np.where(ends, 0, session.lengths).tolist())
            steps = [PackedPrefillRow([row], size) for row in members] + steps
    return last


def max_chunk_tokens(session: Session, batch: Batch) -> int:
    """Returns the most tokens of one step of a prompt."""
    size = batch.context.prefill_step_size
    return min(size, session.max_step_tokens or size)


def _keep_ends(last: mx.array | None, ends: list[bool], logits: mx.array) -> mx.array:
    """Returns the logits [rows, vocab] of the rows in `ends`, and those of `last` for the others."""
    return logits if last is None else mx.where(mx.array(ends)[:, None], logits, last)
