"""Sizes: the columns that a step reads, the slots that a row has, and the ring of one that sees a window alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from mlx_transmuter.program import Program

# The context that a step attends over grows from here.
SMALLEST_BUCKET = 64


def context_bucket(length: int, rows: int = 1) -> int:
    """The context bucket of that many positions of each of `rows` rows.

    Powers of two to 256, four sizes an octave to 1,024, then eight; of more rows, as that of one with √rows times the
    length, but no steps below 32. A bucket is a compiled step, and what it holds beyond the length is read for nothing:
    the larger a part attention has in a step, the less of it.
    """
    power = power_of_two_bucket(length)
    reach = power * math.isqrt(rows)
    size = power if reach <= 256 else max(32, power // 8 if reach <= 1024 else power // 16)
    return max(SMALLEST_BUCKET, -(-length // size) * size)


def power_of_two_bucket(length: int) -> int:
    """The slots of a row that may hold that many tokens: a power of two, so that runs of all sizes share few steps."""
    return max(SMALLEST_BUCKET, 1 << max(0, length - 1).bit_length())


class StepColumns(NamedTuple):
    """The columns that a step reads: `context` of them, with `ring` those of a ring; and of layers with a window, in a
    decoder of which others have none, a ring of `near` of them, where that is few enough to be worth it (else 0).
    """

    context: int
    is_ring: bool = False
    window_context: int = 0


class Ring(NamedTuple):
    """A row keeps its last `slots` tokens, however long it gets; the newest sees `window` of them."""

    window: int
    slots: int

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of a step: the first of them still sees its whole window when the last is stored."""
        return self.slots - self.window + 1

    @staticmethod
    def for_window(window: int) -> Ring:
        """A quarter more than the window, for the tokens of a step: a step of one token reads it all."""
        wanted = window + max(window // 4, SMALLEST_BUCKET // 2)
        return Ring(window, -(-wanted // SMALLEST_BUCKET) * SMALLEST_BUCKET)


def attention_windows(program: Program) -> set[int]:
    """The windows of the attention nodes of a program over pools; 0 where one sees all columns, or it isn't known."""
    nodes = list(program.all_nodes())
    makes = {name: node for node in nodes for name in node.outputs}
    found = set()
    for node in nodes:
        if node.op == "mlx.attention":
            shows = makes.get("".join(node.inputs[6:7]))
            if shows is not None and shows.op == "mlx.alibi":
                shows = makes.get("".join(shows.inputs[1:2]))
            window = shows.attrs.get("window") if shows is not None and shows.op == "mlx.visible" else None
            found.add(window if isinstance(window, int) and window > 0 else 0)
    return found


def choose_window_context(window: int | None, seq: int, context: int, paged: bool) -> int:
    """The columns of a ring for a step's layers with a window, 0 where they had better read as the others do.

    They are gathered one by one; a run of slots is read as it lies, four times as many for the same cost.
    """
    width = context_bucket(window + seq - 1) if window else context
    return width if (width < context if paged else 4 * width <= context) else 0
