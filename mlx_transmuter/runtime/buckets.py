"""Sizes: the columns that a step reads, the slots that a row has, and the ring of one that sees a window alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from mlx_transmuter.ops import bind_inputs
from mlx_transmuter.program import Node, Program

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
    """Returns the windows of the attention of a program over pools, in positions; 0 where it sees all columns.

    A conversion records them in the metadata; for folders without that record they are read off the nodes.
    """
    windows = program.metadata.get("attention_windows")
    if isinstance(windows, list) and all(isinstance(window, int) and window >= 0 for window in windows):
        return set(windows)
    return find_attention_windows(program)


def find_attention_windows(program: Program) -> set[int]:
    """Returns the windows that the masks of a program's attention nodes have; 0 for all columns or an unknown mask."""
    nodes = list(program.all_nodes())
    producers = {name: node for node in nodes for name in node.outputs}
    return {_window_of(node, producers) for node in nodes if node.op == "mlx.attention"}


def _window_of(attention: Node, producers: Mapping[str, Node]) -> int:
    mask = producers.get(bind_inputs(attention).get("mask", ""))
    if mask is not None and mask.op == "mlx.alibi":
        mask = producers.get(bind_inputs(mask).get("mask", ""))
    window = mask.attrs.get("window") if mask is not None and mask.op == "mlx.visible" else None
    return window if isinstance(window, int) and window > 0 else 0


def choose_window_context(window: int | None, seq: int, context: int, paged: bool) -> int:
    """The columns of a ring for a step's layers with a window, 0 where they had better read as the others do.

    They are gathered one by one; a run of slots is read as it lies, four times as many for the same cost.
    """
    width = context_bucket(window + seq - 1) if window else context
    return width if (width < context if paged else 4 * width <= context) else 0
