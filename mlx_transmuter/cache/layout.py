"""The layout of a cache: the row of a slot in a pool, contiguous slots and those of blocks, the columns of a ring.

Each function takes and returns Python ints, numpy arrays or MLX arrays alike unless it names a type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

INT32_MAX = 2**31 - 1


def ceil_div(count: int, size: int) -> int:
    """⌈count / size⌉: the number of groups of `size` that `count` things need."""
    return -(-count // size)


def in_range(numbers: Any, size: Any) -> Any:
    """Whether numbers are indices of an axis of that size: at least 0 and below it."""
    return (numbers >= 0) & (numbers < size)


# Pools


def pool_rows(slots: Any, heads: Any, num_heads: int, head_span: int) -> Any:
    """The rows of slots in a pool that keeps the vectors of num_heads heads apart, of the head with the number `heads`.

    `head_span` slots of a head lie together, and those of the next head follow: [slots // head_span, num_heads,
    head_span] is the order of the rows. slots and heads broadcast.
    """
    return (slots // head_span * num_heads + heads) * head_span + slots % head_span


def pool_size(num_slots: int, num_heads: int) -> int:
    """The rows of a pool: one for each slot and head, and the spare row, where padding is written."""
    return num_heads * num_slots + 1


def spare_pool_row(size: int) -> int:
    """The spare row of a pool of that many rows: the last one, which nothing reads."""
    return size - 1


# Contiguous slots, and those of blocks


def contiguous_slots(row: Any, position: Any, contiguous_stride: int) -> Any:
    """The slot of a position of a sequence with contiguous slots: row r of the table has those from r ·
    contiguous_stride."""
    return row * contiguous_stride + position


def contiguous_table(rows: int, contiguous_stride: int) -> np.ndarray:
    """The table int32 [rows, contiguous_stride] of sequences with contiguous slots, one sequence after another."""
    return contiguous_slots(
        np.arange(rows, dtype=np.int32)[:, None], np.arange(contiguous_stride, dtype=np.int32), contiguous_stride
    )


def contiguous_table_of_lengths(
    lengths: np.ndarray, width: int, contiguous_stride: int, *, ring: bool = False
) -> np.ndarray:
    """The table int32 [rows, width] of sequences of lengths int32 [rows] tokens with contiguous slots: the slots of the
    first `width` positions, or of a ring of the last; -1 where a sequence has no token."""
    positions, lengths = np.arange(width, dtype=np.int32), np.asarray(lengths, np.int32)[:, None]
    if ring:
        positions = ring_position(positions, lengths - 1, width)
    has_slot = in_range(positions, lengths) & in_range(positions, contiguous_stride)
    row = np.arange(len(lengths), dtype=np.int32)[:, None]
    return np.where(has_slot, contiguous_slots(row, positions, contiguous_stride), -1).astype(np.int32)


def slots_of_blocks(blocks: Any, block_size: int) -> np.ndarray:
    """The slots of blocks int32 [n], int32 [n · block_size]: block b has the slots from b · block_size on."""
    blocks = np.asarray(blocks, np.int32)
    if block_size == 1:
        return blocks.copy()
    return (blocks[:, None] * block_size + np.arange(block_size, dtype=np.int32)).reshape(-1)


# Columns


def ring_column(position: Any, width: int) -> Any:
    """The column of a position in a ring of `width` columns."""
    return position % width


def ring_position(column: Any, newest: Any, width: int) -> Any:
    """The position of a column in a ring of `width` columns whose greatest position is `newest`; negative for none."""
    return newest - (newest - column) % width


@lru_cache(maxsize=128)
def shared_arange(count: int) -> mx.array:
    """Returns 0, 1, …, count - 1 in int32: the same array each time, known before a step runs.

    mx.compile merges operations whose inputs are the same arrays, so that all layers of a step share the positions,
    angles and masks computed from this one; two aranges are two arrays to it, and `mx.arange` a kernel of each step.
    """
    return mx.array(np.arange(count, dtype=np.int32))


def last_index(width: int) -> mx.array:
    """width - 1, int32 [1], as a view of a larger array: a single number is a constant of the kernels that it is
    compiled into, so that each width of a table would build kernels of its own."""
    return mx.array([width - 1, width - 1], mx.int32)[:1]


def clip_columns(columns: mx.array, width: int) -> mx.array:
    """columns int32 with those outside 0 to width - 1 replaced by the nearest column."""
    return mx.clip(columns, 0, last_index(width))


def is_column(columns: mx.array, width: int) -> mx.array:
    """in_range(columns, width), with the width as an array; see last_index."""
    return (columns >= 0) & (columns <= last_index(width))


def left_padded_positions(lengths: Sequence[Sequence[int]], seq: int) -> np.ndarray:
    """Positions int32 [rows, seq] of each row's sequences, one after another, at its end; -1 before them."""
    positions = np.full((len(lengths), seq), -1, np.int32)
    for row, row_lengths in zip(positions, lengths, strict=True):
        count = sum(row_lengths)
        if count:
            row[seq - count :] = np.concatenate([np.arange(length) for length in row_lengths])
    return positions
