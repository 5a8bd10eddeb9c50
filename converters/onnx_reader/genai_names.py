"""Names that genai_config.json gives a decoder's inputs and outputs, replaced by those that decoders have elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlx_transmuter.program import Program, Value
from mlx_transmuter.program.renaming import rename_values
from mlx_transmuter.program.signature import MASK_INPUT, POSITIONS_INPUT, TOKEN_INPUTS

_INPUT_NAMES = (*TOKEN_INPUTS, MASK_INPUT, POSITIONS_INPUT)
_OUTPUT_NAMES = ("logits",)


def apply_genai_names(program: Program, genai_config: dict[str, Any]) -> Program:
    """Returns the program with its tokens, mask, positions and logits under their usual names.

    genai_config: `model.decoder.inputs` and `outputs` say which value is which: "input_ids" -> its name in the graph.
    A name that another value has is left, and so are the names of caches.
    """
    decoder = _object(_object(genai_config, "model"), "decoder")
    names = _renames(_object(decoder, "inputs"), _INPUT_NAMES) | _renames(_object(decoder, "outputs"), _OUTPUT_NAMES)
    ends = {value.name for value in (*program.inputs, *program.outputs)}
    taken = ends | {name for node in program.all_nodes() for name in node.outputs}
    taken |= program.weights.keys() | program.constants.keys()
    names = {old: new for old, new in names.items() if old in ends and new not in taken}

    def renamed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(replace(value, name=names.get(value.name, value.name)) for value in values)

    return replace(rename_values(program, names), inputs=renamed(program.inputs), outputs=renamed(program.outputs))


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key, {} where there is none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _renames(graph_names: dict[str, Any], usual_names: tuple[str, ...]) -> dict[str, str]:
    """Name in the graph -> usual name."""
    return {name: usual for usual, name in graph_names.items() if usual in usual_names and isinstance(name, str)}
