"""The search for the rewrites to keep: as many as agree, a wrong one left out alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import RewriteError
from mlx_transmuter.converters.graph.rewriting import Rewrite, RewriteRecord
from mlx_transmuter.converters.passes import apply_rewrites
from mlx_transmuter.program import Program, ProgramError
from mlx_transmuter.program.signature import SignatureError

# What a wrong rewrite raises where it is applied, or where its program is put together.
REWRITE_ERRORS = (ProgramError, SignatureError, ops.OperatorError, RewriteError)

Result = TypeVar("Result")


@dataclass(frozen=True)
class AgreeingRewrites(Generic[Result]):
    """The rewrites that agreed together, the program after them, their records, and the result of its trial."""

    rewrites: tuple[Rewrite, ...]
    program: Program
    records: list[RewriteRecord]
    result: Result

    def all_records(self, rewrites: tuple[Rewrite, ...]) -> list[RewriteRecord]:
        """Returns the records with one for each of `rewrites` that was left out."""
        left_out = (rewrite for rewrite in rewrites if rewrite not in self.rewrites)
        reason = "the module disagreed with the graph"
        return self.records + [RewriteRecord(rewrite.__name__, 0, {reason: 1}) for rewrite in left_out]


class RewriteSearch(Generic[Result]):
    """One search for rewrites of the program `start`.

    trial: takes a program and the records of its rewrites; gives what the program's proof found, or None where the
    program disagrees with the graph. A program is tried once, however many sets of rewrites lead to it.
    """

    def __init__(self, start: Program, trial: Callable[[Program, list[RewriteRecord]], Result | None]):
        self.start, self.trial = start, trial
        self._disagreeing: set[tuple[Rewrite, ...]] = set()  # sets of rewrites, without those that replace nothing

    def attempt(self, rewrites: tuple[Rewrite, ...]) -> AgreeingRewrites[Result] | None:
        """Returns the program after these rewrites if it agrees, else None."""
        try:
            program, records = apply_rewrites(self.start, rewrites)
        except REWRITE_ERRORS:
            return None
        effective = tuple(rewrite for rewrite, record in zip(rewrites, records, strict=True) if record.replaced_count)
        if effective in self._disagreeing:
            return None
        result = self.trial(program, records)
        if result is None:
            self._disagreeing.add(effective)
            return None
        return AgreeingRewrites(rewrites, program, records, result)

    def leave_out_wrong(self, rewrites: tuple[Rewrite, ...]) -> AgreeingRewrites[Result] | None:
        """Returns the most of the rewrites that agree, where all of them together do not; None where no set does.

        First each one alone is left out, a late one first, since rewrites build on those before them. Where more than
        one is wrong, the longest run of first ones that agrees is taken, with each later one that agrees with them.
        """
        for wrong in reversed(rewrites):
            if agreeing := self.attempt(tuple(rewrite for rewrite in rewrites if rewrite is not wrong)):
                return agreeing
        for count in range(len(rewrites) - 2, -1, -1):
            if agreeing := self.attempt(rewrites[:count]):
                for later in rewrites[count + 1 :]:
                    agreeing = self.attempt((*agreeing.rewrites, later)) or agreeing
                return agreeing
        return None
