"""The weights of a conversion on their way into its folder, and one set of arrays for all programs of a proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.stages import advance, enter_stage
from mlx_transmuter.program import Program, weights
from mlx_transmuter.runtime.module import ProgramModule


class SharedArrays:
    """The arrays of some tensors, for every program that was made of these tensors: no weight is in memory twice."""

    def __init__(self, tensors: Mapping[str, LazyTensor], arrays: Mapping[str, mx.array]):
        self._arrays: dict[LazyTensor, Callable[[], mx.array]] = {}
        for name, tensor in tensors.items():
            self._add(tensor, lambda array=arrays[name]: array)

    @staticmethod
    def of(module: ProgramModule) -> SharedArrays:
        """Returns the arrays that a module holds."""
        return SharedArrays(module.program.tensors, module.weights())

    def _add(self, tensor: LazyTensor, array: Callable[[], mx.array]) -> None:
        self._arrays[tensor] = array
        for component, view in tensor.components:
            self._add(component, lambda view=view: view(array()))

    def module(self, program: Program) -> ProgramModule:
        """Returns the module of a program over these arrays; a tensor that is not among them is read from the ONNX
        file into memory.
        """
        arrays = {
            name: self._arrays[tensor]() if tensor in self._arrays else tensor.to_device()
            for name, tensor in program.tensors.items()
        }
        return ProgramModule(program, arrays)


class StagedWeights:
    """The safetensors of the folder that a conversion fills."""

    def __init__(self, folder: Path, *, progress: bool = False):
        self.folder, self.progress = folder, progress
        self._program: Program | None = None  # the one whose weights lie in the folder

    def save(self, program: Program) -> None:
        """Writes the program's weights in place of those that lie there, unless they are the same."""
        if self._program is not None and self._program.tensors == program.tensors:
            return
        enter_stage("writing the weights")
        self._program = None
        for file in self.folder.glob("model*.safetensors*"):
            file.unlink()
        hidden = None if self.progress else True
        with tqdm(total=len(program.tensors), desc="converting", unit="weight", disable=hidden, leave=False) as bar:

            def item(name: str, tensor: LazyTensor) -> tuple[str, int, Callable[[], mx.array]]:
                def read() -> mx.array:
                    bar.update()
                    advance()
                    return tensor.to_device()

                return name, ops.device_dtype(tensor.dtype).size * tensor.size, read

            weights.save(self.folder, [item(name, tensor) for name, tensor in program.tensors.items()])
        self._program = program

    def load(self) -> SharedArrays:
        """Returns the arrays of the weights that were written, each read from the folder when it is first used."""
        assert self._program is not None, "weights are written before they are loaded"
        return SharedArrays(self._program.tensors, weights.load(self.folder, self._program))
