"""Names of the arrays of layers: the array `part` of the layer at `path` is the weight named `path.part`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

# The arrays that a layer may have, by MLX's names.
LAYER_ARRAY_NAMES = ("weight", "bias", "scales", "biases")
Array = TypeVar("Array")


def array_name(path: str, part: str) -> str:
    """Returns the name of the weight that is the array `part` ("weight", "bias", …) of the layer at `path`."""
    return f"{path}.{part}"


def array_owner(name: str, layers: Container[str]) -> tuple[str, str] | None:
    """Returns the path of the layer that owns the weight `name`, and which array of it; None for a weight of no layer.

    layers: the paths of the program's layers.
    """
    path, _, part = name.rpartition(".")
    return (path, part) if part and path in layers else None


def layer_arrays(path: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays of the layer at `path` among those of a program: which array ("weight", …) -> array."""
    start = f"{path}."
    return {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}
