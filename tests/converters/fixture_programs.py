"""Programs of the fixtures as a rewrite gets them, and what a rewrite answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conftest import FIXTURES

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import Rewrite, SkippedMatch
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, POOL_REWRITES, apply_rewrites
from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import outputs

ALL_REWRITES: Sequence[Rewrite] = (*GRAPH_REWRITES, *POOL_REWRITES)


def fixture_graph(name: str) -> Program:
    """Returns the fixture's graph as a conversion has it before the rewrites."""
    program = read_onnx(FIXTURES / name / "model.onnx")
    return name_weights(program.select_outputs(outputs(value.name for value in program.outputs)))


def program_before(name: str, rewrite: Rewrite) -> Program:
    """Returns the fixture's program as the rewrite gets it."""
    return apply_rewrites(fixture_graph(name), ALL_REWRITES[: ALL_REWRITES.index(rewrite)])[0]


def skip_reasons(program: Program, rewrite: Rewrite) -> list[str]:
    """Returns why the rewrite skipped each match that it skipped in the program."""
    return [outcome.reason for outcome in rewrite(GraphView(program)) if isinstance(outcome, SkippedMatch)]


def change_first_node(program: Program, op_type: str, **changes: Any) -> Program:
    """Returns the program with the first node of that operator changed."""
    at = next(i for i, node in enumerate(program.nodes) if node.op.rpartition("-")[0] == op_type)
    nodes = list(program.nodes)
    nodes[at] = replace(nodes[at], **changes)
    return replace(program, nodes=nodes)
