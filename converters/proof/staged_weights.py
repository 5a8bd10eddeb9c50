"""The weights of a conversion on their way into its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.stages import advance, enter_stage
from mlx_transmuter.program import Program, weights


class StagedWeights:
    """The safetensors of the folder that a conversion fills."""

    def __init__(self, folder: Path, *, progress: bool = False):
        self.folder, self.progress = folder, progress
        self._program: Program | None = None  # the one whose weights lie in the folder
        self._names: dict[LazyTensor, str] = {}  # of these weights
        self._unread: dict[str, mx.array] = {}  # arrays of the folder that nothing was computed from

    def save(self, program: Program) -> None:
        """Writes the program's weights in place of those that lie there, unless they are the same."""
        if self._program is not None and self._program.tensors == program.tensors:
            return
        enter_stage("writing the weights")
        self._program, self._names, self._unread = None, {}, {}
        for file in self.folder.glob("model*.safetensors*"):
            file.unlink()
        hidden = None if self.progress else True
        with tqdm(total=len(program.tensors), desc="converting", unit="weight", disable=hidden, leave=False) as bar:

            def stored_weight(name: str, tensor: LazyTensor) -> weights.StoredWeight:
                def rows() -> Iterator[mx.array]:
                    yield from map(ops.to_device, tensor.rows())
                    bar.update()
                    advance()

                return weights.StoredWeight(name, ops.device_dtype(tensor.dtype), tensor.shape, rows)

            weights.save(self.folder, [stored_weight(name, tensor) for name, tensor in program.tensors.items()])
        self._program = program
        self._names = {tensor: name for name, tensor in program.tensors.items()}

    def read(self, tensor: LazyTensor) -> mx.array:
        """Returns the tensor as it was written, or, where it was not, as its ONNX file has it."""
        name = self._names.get(tensor)
        if name is None or self._program is None:
            return tensor.to_device()
        if name not in self._unread:
            self._unread = weights.load(self.folder, self._program)
        return self._unread.pop(name)
