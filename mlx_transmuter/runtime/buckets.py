"""Buckets: the few numbers of columns that steps read and of slots that rows have, so that few steps are compiled."""

from __future__ import annotations

import math
from typing import NamedTuple

from mlx_transmuter.cache.layout import ceil_div

# The context that a step attends over grows from here.
SMALLEST_BUCKET = 64


def context_bucket(length: int, rows: int = 1) -> int:
    """Returns the context bucket of `length` positions of each of `rows` rows: the columns that a step reads for them.

    Buckets are powers of two up to 256, then four an octave up to 1,024, then eight; of several rows, those of one row
    of √rows times the length, but never less than 32 apart. Each bucket is a compiled step, and its columns beyond the
    length are read for nothing: the larger the share of attention in a step, the finer the buckets.
    """
    power = power_of_two_bucket(length)
    reach = power * math.isqrt(rows)
    if reach <= 256:
        granularity = power
    else:
        granularity = max(32, power // (8 if reach <= 1024 else 16))
    return max(SMALLEST_BUCKET, ceil_div(length, granularity) * granularity)


def power_of_two_bucket(length: int) -> int:
    """Returns the slots of a row that may have `length` tokens: a power of two, so that sessions share few steps."""
    return max(SMALLEST_BUCKET, 1 << max(0, length - 1).bit_length())


class StepColumns(NamedTuple):
    """The columns that a step reads.

    context: how many. is_ring: whether they are a ring. window_context: how many columns of a ring the layers with a
    window read, in a decoder where others have none and where that is few enough to be worth it; 0 where they read as
    the others do.
    """

    context: int
    is_ring: bool = False
    window_context: int = 0


class Ring(NamedTuple):
    """The slots of a row that keeps its last `slots` tokens, however long it gets; the newest sees `window` of them."""

    window: int
    slots: int

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of a step: the first still sees its whole window when the last is stored."""
        return self.slots - self.window + 1

    @staticmethod
    def for_window(window: int) -> Ring:
        """Returns a ring of a quarter more than the window, for the tokens of a step: a step of one token reads all."""
        slots = window + max(window // 4, SMALLEST_BUCKET // 2)
        return Ring(window, ceil_div(slots, SMALLEST_BUCKET) * SMALLEST_BUCKET)


def choose_window_context(window: int | None, seq: int, context: int, paged: bool) -> int:
    """Returns the columns of a ring for a step's layers with a window, 0 where reading as the others do is as fast.

    The slots of a ring are gathered one by one; contiguous slots are read as they lie, four times as many at the same
    cost.
    """
    width = context_bucket(window + seq - 1) if window else context
    is_faster = width < context if paged else 4 * width <= context
    return width if is_faster else 0
