"""StreamedModule: a ProgramModule whose weights are read where a call uses them, for a model larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.ops.indices import IntegerRange
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.program_walk import ProgramWalk, find_last_reads
from mlx_transmuter.runtime.weight_tree import read_leaf


class StreamedModule(ProgramModule):
    """A ProgramModule without parameters, which reads the weights anew in each call and keeps none after its last use.

    Its nodes are evaluated one by one, so a call is not to be compiled. Its results are those of a ProgramModule of the
    same weights.
    """

    is_compilable = False

    def __init__(self, program: Program, read_weight: Callable[[str], mx.array]):
        """read_weight: returns the array of a weight by its name, not to be kept by others. Raises ProgramError for a
        program that is none; a call raises it for an array of another dtype or shape.
        """
        nn.Module.__init__(self)
        program.validate(is_known_operator=ops.OPERATORS.__contains__)
        self._program, self._read_weight = program, read_weight
        self._last_reads_by_node = find_last_reads(program)

    def weights(self) -> dict[str, mx.array]:
        """Returns no arrays: none is kept."""
        return {}

    def _make_walk(
        self, inputs: dict[str, mx.array | np.ndarray], eager: bool, ranges: Mapping[str, IntegerRange] | None
    ) -> ProgramWalk:
        leaves = self._program.weights.keys() | self._program.layers.keys()
        return ProgramWalk(
            dict(inputs),
            set(leaves),
            self._last_reads_by_node,
            eager,
            lambda name: read_leaf(name, self._program, self._read_weight),
            ranges,
        )
