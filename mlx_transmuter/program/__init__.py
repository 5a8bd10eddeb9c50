"""The Program, the one form of a graph: its values and nodes, its JSON, its weights, and what it says of a decoder."""

from mlx_transmuter.program.layer_arrays import LAYER_ARRAY_NAMES
from mlx_transmuter.program.program import (
    MAX_CONSTANT_ELEMENTS,
    MAX_PROGRAM_BYTES,
    ONNX_DTYPES,
    PROGRAM_FORMAT,
    PROGRAM_VERSION,
    Node,
    Program,
    ProgramError,
    Value,
    WeightInfo,
)

__all__ = [
    "LAYER_ARRAY_NAMES",
    "MAX_CONSTANT_ELEMENTS",
    "MAX_PROGRAM_BYTES",
    "ONNX_DTYPES",
    "PROGRAM_FORMAT",
    "PROGRAM_VERSION",
    "Node",
    "Program",
    "ProgramError",
    "Value",
    "WeightInfo",
]
