"""Branches: a merged decoder, one If on use_cache_branch, as the plain decoder that one of its branches is.

Exporters merge two graphs into one file: a branch for prompts, without a cache, and one for tokens after a cache. Given
an empty cache, the second is the first, if its exporter did not write a length of 1 into it; which a conversion tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from converters.match import Answer, Become, Graph, apply, is_kind
from converters.passes.fold import fold
from mlx_transmuter.program import Program


def branch_taken(program: Program, name: str, taken: bool) -> Program:
    """The program with the value `taken` for its input `name`: each If on it becomes the branch that it then takes.

    Nodes of the branch stand where the If stood, and weights of the other branch alone are gone.
    """
    inputs = tuple(value for value in program.inputs if value.name != name)
    program = replace(program, inputs=inputs, constants={**program.constants, name: np.array([taken])})
    held = 1
    while held:  # a branch may hold an If on the same value
        program, _ = apply(program, fold)
        program, record = apply(program, _decided)
        held = record.held
    return program


def _decided(graph: Graph) -> Iterator[Answer]:
    """An If on a constant → the nodes of the branch that it takes."""
    for node in graph.nodes:
        condition = graph.constant(node.inputs[0]) if is_kind(node, "If") else None
        if condition is not None and condition.size == 1:
            branch = node.attrs["then_branch" if condition.item() else "else_branch"]
            given = [value.name for value in branch.outputs]
            yield Become(node, tuple(branch.nodes), aliases=dict(zip(node.outputs, given, strict=True)))
