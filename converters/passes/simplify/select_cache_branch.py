"""Branches: a merged decoder, one If on use_cache_branch, becomes the decoder that one of its branches is.

Exporters merge two graphs into one file: a branch for prompts, without a cache, and one for tokens after a cache. With
an empty cache the second computes what the first does, unless its exporter wrote a length of 1 into it; a conversion
tries it.
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
    """Returns the program with a fixed value of a boolean input: each If on it is replaced by the branch that it takes.

    The branch's nodes take the place of the If; weights that only the other branch reads are dropped.
    """
    inputs = tuple(value for value in program.inputs if value.name != input_name)
    program = replace(program, inputs=inputs, constants={**program.constants, input_name: np.array([condition])})
    replaced_count = 1
    while replaced_count:  # a branch may hold an If on the same value
        program, _ = apply_rewrite(program, fold_constants)
        program, record = apply_rewrite(program, _inline_constant_ifs)
        replaced_count = record.replaced_count
    return program


def _inline_constant_ifs(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces an If on a constant by the nodes of the branch that it takes."""
    for node in graph.nodes:
        condition = graph.scalar(node.inputs[0]) if is_op_type(node, "If") else None
        if condition is not None:
            branch = node.attrs["then_branch" if condition else "else_branch"]
            outputs = [value.name for value in branch.outputs]
            yield Replacement(node, tuple(branch.nodes), aliases=dict(zip(node.outputs, outputs, strict=True)))
