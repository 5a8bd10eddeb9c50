"""Branches: a merged decoder, one If on use_cache_branch, as the plain decoder that one of its branches is.

Exporters merge two graphs into one file: a branch for prompts, without a cache, and one for tokens after a cache. Given
an empty cache, the second is the first, if its exporter did not write a length of 1 into it; which a conversion tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement, apply_rewrite
from mlx_transmuter.converters.passes.simplify.fold_constants import fold_constants
from mlx_transmuter.program import Program


def select_branch(program: Program, input_name: str, condition: bool) -> Program:
    """The program with the value `taken` for its input `name`: each If on it becomes the branch that it then takes.

    Nodes of the branch stand where the If stood, and weights of the other branch alone are gone.
    """
    inputs = tuple(value for value in program.inputs if value.name != input_name)
    program = replace(program, inputs=inputs, constants={**program.constants, input_name: np.array([condition])})
    held = 1
    while held:  # a branch may hold an If on the same value
        program, _ = apply_rewrite(program, fold_constants)
        program, record = apply_rewrite(program, _inline_constant_ifs)
        held = record.replaced_count
    return program


def _inline_constant_ifs(graph: GraphView) -> Iterator[MatchOutcome]:
    """An If on a constant → the nodes of the branch that it takes."""
    for node in graph.nodes:
        condition = graph.constant(node.inputs[0]) if is_op_type(node, "If") else None
        if condition is not None and condition.size == 1:
            branch = node.attrs["then_branch" if condition.item() else "else_branch"]
            given = [value.name for value in branch.outputs]
            yield Replacement(node, tuple(branch.nodes), aliases=dict(zip(node.outputs, given, strict=True)))
