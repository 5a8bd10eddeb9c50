"""Common subexpressions: what several nodes compute is computed once."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_transmuter.converters.graph.equal_values import first_equal_values
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement


def eliminate_common_subexpressions(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces a node by an earlier one of the same operator, attributes and inputs.

    Exporters write the cos and sin of a rotation, the shapes of reshapes, and casts of a mask once a layer or more.
    """
    firsts = first_equal_values(graph)
    for node in graph.nodes:
        aliases = {name: firsts[name] for name in node.outputs if firsts.get(name, name) != name}
        if aliases:
            yield Replacement(node, (), aliases=aliases)
