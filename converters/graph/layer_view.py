"""The layer view: the arrays of a program's layers, by the path of the layer and the name of the array."""

from __future__ import annotations

from collections.abc import Collection

from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.program import Program
from mlx_transmuter.program.layer_arrays import array_name, layer_arrays


def name_arrays(path: str, arrays: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the arrays of a layer at `path` ("weight", … -> tensor) by the names that they have as weights."""
    return {array_name(path, part): tensor for part, tensor in arrays.items()}


class LayerView:
    """The weights of a program as arrays of its layers ("weight", "bias", "scales", "biases")."""

    def __init__(self, program: Program):
        self.program = program

    def arrays(self, path: str) -> dict[str, LazyTensor]:
        """The arrays of the layer at `path`: "weight", "bias", … -> tensor."""
        return layer_arrays(path, self.program.tensors)

    def free_path(self, path: str, suffix: str, removed: Collection[str] = (), added: Collection[str] = ()) -> str:
        """Returns `path` with `suffix` after it as often as it takes until no weight stands at the path or inside it.

        removed, added: names of weights that the caller takes out of the program, and puts into it.
        """
        names = [name for name in (*self.program.tensors, *added) if name not in removed]
        while any(name == path or name.startswith(f"{path}.") for name in names):
            path += suffix
        return path
