"""Names of weights: those of the exporter's scopes, so that a person and MLX's tools find them.

An exporter keeps a weight's name (`model.norm.weight`) unless it folded something into it (`onnx::MatMul_733`). Then
the scope of the node that reads it (`/model/layers.0/self_attn/q_proj/MatMul`) gives the weight its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from mlx_transmuter.ops import OPERATORS
from mlx_transmuter.program import Node, Program
from mlx_transmuter.program.renaming import redirect_reads

# The last part of a weight's name, by the operator's name for the input that reads it.
_NAMES_BY_INPUT = {
    **dict.fromkeys(("bias", "c"), "bias"),
    **dict.fromkeys(("scales", "x_scale"), "scales"),
    **dict.fromkeys(("zero_points", "x_zero_point", "b_zero_point"), "zero_points"),
    "cos_cache": "cos",
    "sin_cache": "sin",
}
_BIAS_OPERATORS = ("Add", "Sub")  # whichever operand the weight is
# Operators whose other weights are "weight"; with any other operator a weight has the operator's name.
_WEIGHT_OPERATORS = (
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "Mul", "Gather", "LayerNormalization", "RMSNormalization"),
    *("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization"),
    *("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear", "MatMulInteger"),
)
# What a tool that merges decoders adds to the names of weights that its branches share.
_MERGE_SUFFIX = re.compile(r"_merged_\d+$")
_DOTTED_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)+")


def name_weights(program: Program) -> Program:
    """Returns the program with every weight renamed to a dotted path that no other value has and none begins with."""
    readers: dict[str, tuple[Node, int]] = {}
    for node in program.all_nodes():
        for number, name in enumerate(node.inputs):
            if name in program.weights:
                readers.setdefault(name, (node, number))
    taken = {value.name for value in program.inputs} | program.constants.keys()
    paths = _UniquePaths(taken | {name for node in program.all_nodes() for name in node.outputs})
    names: dict[str, str] = {}
    # Names that stay come first, so that no derived one takes their place.
    for name in sorted(program.weights, key=lambda name: not _is_dotted_path(name)):
        if _is_dotted_path(name) or name not in readers:
            path = _dotted_path(_MERGE_SUFFIX.sub("", name))
        else:
            path = _path_from_reader(*readers[name])
        names[name] = paths.declare(path)
    return _rename_weights(program, names)


class _UniquePaths:
    """Dotted paths of weights, each made unique by numbers after its scopes and its last part."""

    def __init__(self, taken: Iterable[str]):
        """taken: names of other values, which neither a weight nor a scope may have."""
        self._taken = set(taken)
        self._scopes: dict[str, str] = {}  # scope -> its unique path
        self._scope_paths: set[str] = set()
        self._last_numbers: dict[str, int] = {}  # path -> the last number after it

    def declare(self, path: str) -> str:
        """Returns the path of a new weight: `path`, or one like it that is no other weight's and no scope."""
        *scopes, last = path.split(".")
        prefix = ""
        for scope in scopes:
            scope_path = f"{prefix}{scope}"
            if scope_path not in self._scopes:
                self._scopes[scope_path] = self._unique(scope_path, self._taken)
                self._scope_paths.add(self._scopes[scope_path])
            prefix = f"{self._scopes[scope_path]}."
        unique = self._unique(f"{prefix}{last}", self._taken, self._scope_paths)
        self._taken.add(unique)
        return unique

    def _unique(self, path: str, *taken: set[str]) -> str:
        unique = path
        while any(unique in names for names in taken):
            self._last_numbers[path] = self._last_numbers.get(path, 1) + 1
            unique = f"{path}_{self._last_numbers[path]}"
        return unique


def _is_dotted_path(name: str) -> bool:
    """Whether a weight's name, but for what a merge added to it, is a dotted path of at least two parts."""
    return _DOTTED_PATH.fullmatch(_MERGE_SUFFIX.sub("", name)) is not None


def _dotted_path(name: str) -> str:
    """Returns `name` as a dotted path of parts of letters, digits, _ and -. No part is empty, and none begins with _,
    since MLX hides such names.
    """
    parts = [re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_") for part in re.split(r"[./]+", name)]
    return ".".join(part for part in parts if part) or "weight"


def _path_from_reader(node: Node, number: int) -> str:
    """The path of a weight that `node` reads as its input of that number: the node's scope, and the input's role."""
    operator = node.op_type.rpartition(".")[2]
    scope = node.name.rpartition("/")[0] if "/" in node.name else node.name
    scope_path = _dotted_path(scope) if node.name else operator.lower()
    return f"{scope_path}.{_role(node, operator, number)}"


def _role(node: Node, operator: str, number: int) -> str:
    """What a weight is to the node that reads it: "bias", "scales", …, "weight", or the operator's name."""
    if operator in _BIAS_OPERATORS:
        return "bias"
    declared = OPERATORS.get(node.op)
    if declared and (role := _NAMES_BY_INPUT.get(declared.input_name(number))):
        return role
    return "weight" if operator in _WEIGHT_OPERATORS else operator.lower()


def _rename_weights(program: Program, names: dict[str, str]) -> Program:
    """Returns the program with its weights renamed: old name -> new name."""
    return replace(
        program,
        nodes=[redirect_reads(node, names) for node in program.nodes],
        outputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in program.outputs),
        weights={names[name]: weight for name, weight in program.weights.items()},
        tensors={names[name]: tensor for name, tensor in program.tensors.items()},
    )
