"""Names of weights: those of the exporter's scopes, so that a person and MLX's tools find them.

An exporter keeps a weight's name (`model.norm.weight`) unless it folded something into it (`onnx::MatMul_733`); then
the node that reads it still stands in its scope (`/model/layers.0/self_attn/q_proj/MatMul`), and the weight takes its
name from there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.renaming import redirect_reads
from mlx_transmuter.program.signature import MASK_INPUT, POSITIONS_INPUT, TOKEN_INPUTS

# What a weight is to the operator that reads it, by the operator's kind and the input's index.
_PARAMETER_ROLES = {
    ("Add", None): "bias",
    ("Sub", None): "bias",
    ("Gemm", 2): "bias",
    ("Conv", 2): "bias",
    ("LayerNormalization", 2): "bias",
    ("MatMulNBits", 2): "scales",
    ("MatMulNBits", 3): "zero_points",
    ("MatMulNBits", 5): "bias",
    ("GatherBlockQuantized", 2): "scales",
    ("GatherBlockQuantized", 3): "zero_points",
    ("MatMulInteger", 3): "zero_points",
    ("DequantizeLinear", 1): "scales",
    ("DequantizeLinear", 2): "zero_points",
    ("GroupQueryAttention", 7): "cos",
    ("GroupQueryAttention", 8): "sin",
    ("RotaryEmbedding", 2): "cos",
    ("RotaryEmbedding", 3): "sin",
}
_WEIGHT_OPERATORS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Mul", "Gather", "LayerNormalization",
           "RMSNormalization", "SimplifiedLayerNormalization",
           "SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "MatMulNBits",
           "GatherBlockQuantized", "DequantizeLinear", "MatMulInteger"}  # fmt: skip
# What a tool that merges decoders adds to the names of weights that its branches share.
_MERGE_SUFFIX = re.compile(r"_merged_\d+$")
_DOTTED_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)+")


def name_weights(program: Program) -> Program:
    """The program with every weight renamed to a dotted path that no other value has and that begins no other's."""
    readers: dict[str, tuple[Node, int]] = {}
    for node in program.all_nodes():
        for i, name in enumerate(node.inputs):
            if name in program.weights:
                readers.setdefault(name, (node, i))
    taken = (
        {value.name for value in program.inputs}
        | set(program.constants)
        | {n for x in program.all_nodes() for n in x.outputs}
    )
    scoped: dict[str, str] = {}  # a scope -> what it is called
    used: set[str] = set()
    last: dict[str, int] = {}
    names: dict[str, str] = {}
    # Names that are good already come first, so that a derived one never takes their place.
    for name in sorted(program.weights, key=lambda name: not _DOTTED_PATH.fullmatch(_MERGE_SUFFIX.sub("", name))):
        own = _MERGE_SUFFIX.sub("", name)
        wanted = (
            _dotted_path(own)
            if _DOTTED_PATH.fullmatch(own) or name not in readers
            else _name_from_reader(*readers[name])
        )
        path = ""
        *scopes, leaf = wanted.split(".")
        for scope in scopes:
            whole = f"{path}.{scope}" if path else scope
            path = scoped.get(whole) or _unique_name(whole, last, taken)
            scoped[whole] = path
            used.add(path)
        names[name] = _unique_name(f"{path}.{leaf}" if path else leaf, last, taken, used)
        taken.add(names[name])
    return _rename_weights(program, names)


def apply_genai_names(program: Program, genai_config: dict[str, Any]) -> Program:
    """The program with its inputs and logits under the names that decoders have, where genai_config.json says that
    they have others (`model.decoder.inputs` and `outputs`: what is called what). Names of caches stay.
    """
    names: dict[str, str] = {}
    part: Any = genai_config
    for key in ("model", "decoder"):
        part = part.get(key) if isinstance(part, dict) else None
    for side, known in (("inputs", (*TOKEN_INPUTS, MASK_INPUT, POSITIONS_INPUT)), ("outputs", ("logits",))):
        said = part.get(side) if isinstance(part, dict) else None
        names |= (
            {name: key for key, name in said.items() if key in known and isinstance(name, str)}
            if isinstance(said, dict)
            else {}
        )
    values = {value.name for value in (*program.inputs, *program.outputs)}
    taken = values | {name for node in program.all_nodes() for name in node.outputs}
    taken |= program.weights.keys() | program.constants.keys()
    names = {old: new for old, new in names.items() if old in values and new not in taken}
    if not names:
        return program

    def named(given: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(value, name=names.get(value.name, value.name)) for value in given)

    nodes = [
        replace(node, outputs=tuple(names.get(name, name) for name in node.outputs))
        for node in (redirect_reads(node, names) for node in program.nodes)
    ]
    return replace(program, inputs=named(program.inputs), outputs=named(program.outputs), nodes=nodes)


def _unique_name(name: str, last_numbers: dict[str, int], *taken: set[str]) -> str:
    """`name`, or with the first number after it that none has taken; `last` keeps that of each name."""
    unique = name
    while any(unique in names for names in taken):
        last_numbers[name] = last_numbers.get(name, 1) + 1
        unique = f"{name}_{last_numbers[name]}"
    return unique


def _dotted_path(name: str) -> str:
    """`name` as a dotted path: parts of letters, digits, _ and -, none empty, none that starts with _ (MLX hides
    these).
    """
    parts = [re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_") for part in re.split(r"[./]+", name)]
    return ".".join(part for part in parts if part) or "weight"


def _name_from_reader(node: Node, index: int) -> str:
    kind = node.op.rpartition("-")[0].rpartition(".")[2]
    role = (
        _PARAMETER_ROLES.get((kind, index))
        or _PARAMETER_ROLES.get((kind, None))
        or ("weight" if kind in _WEIGHT_OPERATORS else kind.lower())
    )
    scope = (
        _dotted_path(node.name.rpartition("/")[0])
        if "/" in node.name
        else _dotted_path(node.name)
        if node.name
        else kind.lower()
    )
    return f"{scope}.{role}"


def _rename_weights(program: Program, names: dict[str, str]) -> Program:
    def node(old: Node) -> Node:
        attrs = {
            key: _rename_weights(value, names) if isinstance(value, Program) else value
            for key, value in old.attrs.items()
        }
        return replace(old, inputs=tuple(names.get(name, name) for name in old.inputs), attrs=attrs)

    return replace(
        program,
        nodes=[node(old) for old in program.nodes],
        outputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in program.outputs),
        weights={names[name]: weight for name, weight in program.weights.items()},
        tensors={names[name]: array for name, array in program.tensors.items()},
    )
