"""Names of weights: those of the exporter's scopes, so that a person and MLX's tools find them.

An exporter keeps a weight's name (`model.norm.weight`) unless it folded something into it (`onnx::MatMul_733`); then
the node that reads it still stands in its scope (`/model/layers.0/self_attn/q_proj/MatMul`), and the weight takes its
name from there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from converters.match import aliased
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.signature import MASK, POSITIONS, TOKENS

# What a weight is to the operator that reads it, by the operator's kind and the input's index.
_ROLES = {
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
_WEIGHT = {"MatMul", "Gemm", "Conv", "ConvTranspose", "Mul", "Gather", "LayerNormalization", "RMSNormalization",
           "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "SkipLayerNormalization", "MatMulNBits",
           "GatherBlockQuantized", "DequantizeLinear", "MatMulInteger"}  # fmt: skip
# What a tool that merges decoders adds to the names of weights that its branches share.
_MERGED = re.compile(r"_merged_\d+$")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)+")


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
    for name in sorted(program.weights, key=lambda name: not _PLAIN.fullmatch(_MERGED.sub("", name))):
        own = _MERGED.sub("", name)
        wanted = _clean(own) if _PLAIN.fullmatch(own) or name not in readers else _derived(*readers[name])
        path = ""
        *scopes, leaf = wanted.split(".")
        for scope in scopes:
            whole = f"{path}.{scope}" if path else scope
            path = scoped.get(whole) or _unique(whole, last, taken)
            scoped[whole] = path
            used.add(path)
        names[name] = _unique(f"{path}.{leaf}" if path else leaf, last, taken, used)
        taken.add(names[name])
    return _renamed(program, names)


def name_inputs(program: Program, genai: dict[str, Any]) -> Program:
    """The program with its inputs and logits under the names that decoders have, where genai_config.json says that
    they have others (`model.decoder.inputs` and `outputs`: what is called what). Names of caches stay.
    """
    names: dict[str, str] = {}
    part: Any = genai
    for key in ("model", "decoder"):
        part = part.get(key) if isinstance(part, dict) else None
    for side, known in (("inputs", (*TOKENS, MASK, POSITIONS)), ("outputs", ("logits",))):
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
        for node in (aliased(node, names) for node in program.nodes)
    ]
    return replace(program, inputs=named(program.inputs), outputs=named(program.outputs), nodes=nodes)


def _unique(name: str, last: dict[str, int], *taken: set[str]) -> str:
    """`name`, or with the first number after it that none has taken; `last` keeps that of each name."""
    unique = name
    while any(unique in names for names in taken):
        last[name] = last.get(name, 1) + 1
        unique = f"{name}_{last[name]}"
    return unique


def _clean(name: str) -> str:
    """`name` as a dotted path: parts of letters, digits, _ and -, none empty, none that starts with _ (MLX hides
    these).
    """
    parts = [re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_") for part in re.split(r"[./]+", name)]
    return ".".join(part for part in parts if part) or "weight"


def _derived(node: Node, index: int) -> str:
    kind = node.op.rpartition("-")[0].rpartition(".")[2]
    role = _ROLES.get((kind, index)) or _ROLES.get((kind, None)) or ("weight" if kind in _WEIGHT else kind.lower())
    scope = (
        _clean(node.name.rpartition("/")[0]) if "/" in node.name else _clean(node.name) if node.name else kind.lower()
    )
    return f"{scope}.{role}"


def _renamed(program: Program, names: dict[str, str]) -> Program:
    def node(old: Node) -> Node:
        attrs = {
            key: _renamed(value, names) if isinstance(value, Program) else value for key, value in old.attrs.items()
        }
        return replace(old, inputs=tuple(names.get(name, name) for name in old.inputs), attrs=attrs)

    return replace(
        program,
        nodes=[node(old) for old in program.nodes],
        outputs=tuple(replace(value, name=names.get(value.name, value.name)) for value in program.outputs),
        weights={names[name]: weight for name, weight in program.weights.items()},
        arrays={names[name]: array for name, array in program.arrays.items()},
    )
