"""LengthSwitches: the total lengths past which a decoder computes its keys otherwise, as longrope's long factors do.

A graph with a switch reads how many tokens a row has with those of the step, and chooses, say, the factors of its
rotation by that number. Keys from before the switch don't go with queries from after it: a row that passes a switch is
computed anew from its first token, as `prepare_inputs_for_generation` of Phi-3 in transformers 4.57 has it.

A converted program reads the number from the input `total_length`, which is known while a step is traced, and compares
it with constants alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from mlx_transmuter.errors import abbreviate
from mlx_transmuter.program.cache_pairs import SignatureError
from mlx_transmuter.program.program import Program, Value

# The input of a program with switches, by its saved name: int64 [], a number of tokens on the side of the step's rows.
TOTAL_LENGTH_INPUT = "total_length"
TOTAL_LENGTH = Value(TOTAL_LENGTH_INPUT, "int64", ())
# The comparisons of the input with a constant, its second operand.
SWITCH_OPS = ("Greater", "LessOrEqual")
# More tokens than any row has.
_MAX_LENGTH = 2**31


@dataclass(frozen=True)
class LengthSwitches:
    """The switches of a program, in ascending order.

    A row is on one of the sides 0 to len(lengths): on side 0 with up to lengths[0] tokens, on the last with more than
    lengths[-1]. Without switches all rows are on side 0.
    """

    lengths: tuple[int, ...] = ()

    @staticmethod
    def from_program(program: Program) -> LengthSwitches:
        """Returns the switches of a program. Raises SignatureError where it uses `total_length` for anything else."""
        if program.input(TOTAL_LENGTH_INPUT) is None:
            return LengthSwitches()
        lengths = set()
        for node in program.all_nodes():
            if TOTAL_LENGTH_INPUT not in node.inputs:
                continue
            length = _length(program.constants.get(node.inputs[-1]))
            if node.op_type not in SWITCH_OPS or node.inputs[0] != TOTAL_LENGTH_INPUT or length is None:
                found = f"{abbreviate([str(node)])} of the input {TOTAL_LENGTH_INPUT}"
                raise SignatureError(found, f"{' or '.join(SWITCH_OPS)}, and a constant from 1 to {_MAX_LENGTH - 1}")
            lengths.add(length)
        return LengthSwitches(tuple(sorted(lengths)))

    def __bool__(self) -> bool:
        return bool(self.lengths)

    @property
    def sides(self) -> int:
        """The number of sides."""
        return len(self.lengths) + 1

    @property
    def last(self) -> int:
        """The last switch, 0 without any: no row of more tokens is computed anew."""
        return self.lengths[-1] if self.lengths else 0

    def side(self, length: int) -> int:
        """Returns the side of a row of `length` tokens."""
        return bisect_left(self.lengths, length)

    def sides_of(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the sides int32 [rows] of rows of lengths int32 [rows] tokens."""
        return np.searchsorted(self.lengths, lengths).astype(np.int32)

    def max_length(self, side: int) -> int | None:
        """Returns the most tokens of a row on a side; None for the last one, which has no end."""
        return self.lengths[side] if side < len(self.lengths) else None

    def total_length(self, side: int) -> np.ndarray:
        """Returns the input `total_length`, int64 [], for rows on a side."""
        return np.array(self.max_length(side) or self.last + 1, np.int64)

    def next_switch(self, length: int) -> int:
        """Returns the most tokens that a row of `length` tokens can have on its side."""
        return self.max_length(self.side(length)) or _MAX_LENGTH


def _length(constant: np.ndarray | None) -> int | None:
    """Returns the integer in a constant of one element, if it can be a number of tokens; else None."""
    if constant is None or constant.size != 1 or constant.dtype.kind != "i":
        return None
    length = int(constant.item())
    return length if 0 < length < _MAX_LENGTH else None
