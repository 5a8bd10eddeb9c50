"""Rewrites: what one yields for each match of its pattern, and the driver that applies and records it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_transmuter.converters.errors import CHECK_FILE, WELL_FORMED, RewriteError
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.renaming import redirect_reads


@dataclass(frozen=True)
class Replacement:
    """A match: the node `root` is replaced by `nodes`, which compute every output of it that is read.

    aliases: output of `root` -> the value that is read in its place. layers, tensors, constants: new ones of the
    program, by name. program_inputs, program_outputs: values of the program that are new or change their type.
    removed_values: names of inputs and outputs that the program loses.
    """

    root: Node
    nodes: tuple[Node, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    program_inputs: tuple[Value, ...] = ()
    program_outputs: tuple[Value, ...] = ()
    removed_values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SkippedMatch:
    """The node `root` looked like a match and is left as it is, for `reason`."""

    root: Node
    reason: str


MatchOutcome = Replacement | SkippedMatch
Rewrite = Callable[[GraphView], Iterator[MatchOutcome]]


@dataclass
class RewriteRecord:
    """What a rewrite did: its name, the number of nodes that it replaced, and reason -> number of skipped matches."""

    name: str
    replaced_count: int
    skip_reasons: dict[str, int]


def apply_rewrite(program: Program, rewrite: Rewrite, graph: GraphView | None = None) -> tuple[Program, RewriteRecord]:
    """Returns the program after the rewrite, without the nodes that nothing reads any more, and the rewrite's record.

    graph: the view of `program`, where the caller has one. Raises RewriteError for whatever Python and numpy raise.
    """
    replacements: dict[int, Replacement] = {}
    skip_reasons: dict[str, int] = {}
    name = getattr(rewrite, "__name__", "rewrite")
    try:
        for outcome in rewrite(graph or GraphView(program)):
            if isinstance(outcome, SkippedMatch):
                skip_reasons[outcome.reason] = skip_reasons.get(outcome.reason, 0) + 1
            else:
                replacements[id(outcome.root)] = outcome
        program = _replace_nodes(program, replacements) if replacements else program
    except TransmuterError:
        raise
    except MemoryError:  # is of the machine, and no fault of the graph's
        raise
    except Exception as problem:  # of tables, shapes and attributes that do not fit together Python raises anything
        raise RewriteError("", f"{type(problem).__name__}: {problem} (in {name})", WELL_FORMED, CHECK_FILE) from problem
    return program, RewriteRecord(name, len(replacements), skip_reasons)


def _replace_nodes(program: Program, replacements: dict[int, Replacement]) -> Program:
    """Returns the program with each node replaced that stands in `replacements` by its id."""
    nodes: list[Node] = []
    layers, tensors, constants = dict(program.layers), dict(program.tensors), dict(program.constants)
    inputs = {value.name: value for value in program.inputs}
    outputs = {value.name: value for value in program.outputs}
    aliases: dict[str, str] = {}
    for node in program.nodes:
        replacement = replacements.get(id(node))
        if replacement is None:
            nodes.append(redirect_reads(node, aliases))
            continue
        nodes += (redirect_reads(new, aliases) for new in replacement.nodes)
        aliases |= {name: aliases.get(other, other) for name, other in replacement.aliases.items()}
        layers |= replacement.layers
        tensors |= replacement.tensors
        constants |= replacement.constants
        inputs |= {value.name: value for value in replacement.program_inputs}
        outputs |= {value.name: value for value in replacement.program_outputs}
    removed = {name for replacement in replacements.values() for name in replacement.removed_values}
    inputs, outputs = ({n: value for n, value in side.items() if n not in removed} for side in (inputs, outputs))
    program = replace(
        program,
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        nodes=_restore_output_names(nodes, aliases, list(outputs)),
        layers=layers,
        constants=constants,
    )
    return program.with_tensors(tensors).select_outputs([value.name for value in program.outputs])


def _restore_output_names(nodes: list[Node], aliases: dict[str, str], outputs: list[str]) -> list[Node]:
    """Returns the nodes, such that outputs of the program that are aliases now are computed under their own names."""
    computed = {name for node in nodes for name in node.outputs}
    names: dict[str, str] = {}
    copies = []
    for output in outputs:
        source = aliases.get(output)
        if source in computed and source not in outputs and source not in names:
            names[source] = output
        elif source is not None:
            copies.append(Node("Identity-1", (names.get(source, source),), (output,)))
    renamed = [
        replace(node, outputs=tuple(names.get(name, name) for name in node.outputs)) if names else node
        for node in nodes
    ]
    return [redirect_reads(node, names) for node in renamed] + copies
