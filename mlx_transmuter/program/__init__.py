"""The Program, the one form of a graph: its values and nodes, its JSON, its weights, and what it says of a decoder."""

from mlx_transmuter.program.errors import ProgramError
from mlx_transmuter.program.json_form import (
    MAX_PROGRAM_BYTES,
    PROGRAM_FORMAT,
    PROGRAM_VERSION,
    load_program,
    program_from_json,
    program_to_json,
    save_program,
)
from mlx_transmuter.program.layer_arrays import LAYER_ARRAY_NAMES
from mlx_transmuter.program.onnx_dtypes import ONNX_DTYPES
from mlx_transmuter.program.program import MAX_CONSTANT_ELEMENTS, Node, Program, Value, WeightInfo

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
    "load_program",
    "program_from_json",
    "program_to_json",
    "save_program",
]
