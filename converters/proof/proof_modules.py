"""The modules of a proof: programs over the weights that are written, in memory or read at each use."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.proof.memory_budget import MemoryBudget
from mlx_transmuter.converters.proof.staged_weights import StagedWeights
from mlx_transmuter.converters.stages import advance
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.module import ProgramModule
from mlx_transmuter.runtime.streamed_module import StreamedModule


def stream_source(program: Program) -> StreamedModule:
    """Returns the module of a program whose weights are read from the ONNX file where a call uses them."""
    return _stream(program, LazyTensor.to_device)


def _stream(program: Program, read: Callable[[LazyTensor], mx.array]) -> StreamedModule:
    def read_weight(name: str) -> mx.array:
        advance()
        return read(program.tensors[name])

    return StreamedModule(program, read_weight)


class ProofModules:
    """Makes the modules of programs that are tried, one after the other.

    Their weights are those of the staged folder, where they were written. They are in memory where the budget holds
    them, and shared by modules of the same tensors; what the next module does not use is given up before it is made.
    """

    def __init__(self, staged: StagedWeights, budget: MemoryBudget):
        self.staged, self.budget = staged, budget
        self.has_streamed = False  # whether a module was larger than the budget
        self._arrays: dict[LazyTensor, mx.array] = {}

    def release(self) -> None:
        """Gives up what is in memory of the last module."""
        self._arrays = {}

    def module(self, program: Program) -> ProgramModule:
        """Returns the module of a program."""
        tensors = program.tensors
        # Quantized weights may fit where their floats did not, but a CPU dequantizes them, many at a time.
        if self.has_streamed or not self.budget.holds(program):
            self.has_streamed = True
            self.release()
            return _stream(program, self.staged.read)
        self._arrays = {tensor: self._arrays[tensor] for tensor in tensors.values() if tensor in self._arrays}
        for tensor in tensors.values():
            if tensor not in self._arrays:
                self._arrays[tensor] = self.staged.read(tensor)
        return ProgramModule(program, {name: self._arrays[tensor] for name, tensor in tensors.items()})
