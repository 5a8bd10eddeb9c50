"""Same: what several nodes compute alike is computed once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import Node, Program

# Operators whose results differ from one call to the next.
_NONDETERMINISTIC_OPS = ("Random", "Bernoulli", "Multinomial", "Dropout")


def eliminate_common_subexpressions(graph: GraphView) -> Iterator[MatchOutcome]:
    """A node of the operator, attributes and inputs of an earlier one → the earlier one's outputs.

    Exporters write the cos and sin of a rotation, the shapes of reshapes, and casts of a mask once a layer or more.
    """
    constants: dict[Hashable, str] = {}
    names = {name: constants.setdefault(_array_key(array), name) for name, array in graph.program.constants.items()}
    outputs = {value.name for value in graph.program.outputs}
    first: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if node.op.startswith(_NONDETERMINISTIC_OPS) or any(
            isinstance(value, Program | np.ndarray) for value in node.attrs.values()
        ):
            continue
        attrs = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
        inputs = tuple(names.get(name, name) for name in node.inputs)
        given = tuple(bool(name) for name in node.outputs)
        earlier = first.setdefault((node.op, inputs, attrs, given), node)
        if earlier is node or not outputs.isdisjoint(node.outputs):
            continue
        aliases = {name: other for name, other in zip(node.outputs, earlier.outputs, strict=True) if name}
        names |= aliases
        yield Replacement(node, (), aliases=aliases)


def _array_key(array: np.ndarray) -> Hashable:
    return array.dtype.str, array.shape, array.tobytes()
