"""Sizes: the columns that a step reads, the slots that a row has, and the ring of one that sees a window alone."""

from __future__ import annotations

from typing import NamedTuple

from mlx_transmuter.program import Program

# The context that a step attends over grows in powers of two from here.
SMALLEST_BUCKET = 64


def bucket(length: int) -> int:
    """The context bucket of that many positions.

    Powers of two to 256, four sizes an octave to 1,024, then eight. A bucket is a compiled step, and what it holds
    beyond the length is read for nothing: the larger a part attention has in a step, the less of it.
    """
    power = stride(length)
    size = power if power <= 256 else power // 8 if power <= 1024 else power // 16
    return -(-max(length, 1) // size) * size


def stride(length: int) -> int:
    """The slots of a row that may hold that many tokens: a power of two, so that runs of all sizes share few steps."""
    return max(SMALLEST_BUCKET, 1 << max(0, length - 1).bit_length())


class Columns(NamedTuple):
    """The columns that a step reads: `context` of them, with `ring` those of a ring; and of layers with a window, in a
    decoder of which others have none, a ring of `near` of them, where that is few enough to be worth it (else 0).
    """

    context: int
    ring: bool = False
    near: int = 0


class Ring(NamedTuple):
    """A row keeps its last `slots` tokens, however long it gets; the newest sees `window` of them."""

    window: int
    slots: int

    @property
    def step(self) -> int:
        """The most tokens of a step: the first of them still sees its whole window when the last is stored."""
        return self.slots - self.window + 1

    @staticmethod
    def over(window: int) -> Ring:
        """A quarter more than the window, for the tokens of a step: a step of one token reads it all."""
        wanted = window + max(window // 4, SMALLEST_BUCKET // 2)
        return Ring(window, -(-wanted // SMALLEST_BUCKET) * SMALLEST_BUCKET)


def windows(program: Program) -> set[int]:
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


def near_columns(window: int | None, seq: int, context: int, paged: bool) -> int:
    """The columns of a ring for a step's layers with a window, 0 where they had better read as the others do.

    They are gathered one by one; a run of slots is read as it lies, four times as many for the same cost.
    """
    width = bucket(window + seq - 1) if window else context
    return width if (width < context if paged else 4 * width <= context) else 0
