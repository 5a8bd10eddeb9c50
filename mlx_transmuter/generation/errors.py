"""The public errors of generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mlx_transmuter.errors import TransmuterError, abbreviate

if TYPE_CHECKING:
    from mlx_transmuter.generation.batch import RowFault
    from mlx_transmuter.generation.row import GenerationResult


class GenerationError(TransmuterError):
    """A setting or an input that generation cannot take; `where` names it."""


class ScoreError(GenerationError):
    """Rows whose scores leave no token to select: NaN, all tokens removed, or infinite where tokens are sampled.

    The error comes when the other rows have run to their ends. results: those of all rows, as `generate_steps` would
    return them; a row of the error has the finish_reason "error" and the tokens before it. rows, steps: of each such
    row its index among the results (of beams: its prompt's first), and the number of tokens before the failing one.
    """

    def __init__(self, faults: Mapping[int, RowFault], results: Sequence[GenerationResult]):
        self.rows, self.steps = tuple(faults), tuple(fault.step for fault in faults.values())
        self.results = list(results)
        first = next(iter(faults.values()))
        where = abbreviate([f"row {row}, step {fault.step}" for row, fault in faults.items()])
        super().__init__(where, first.fault.description, "a finite score to select a token by", first.fault.remedy)
