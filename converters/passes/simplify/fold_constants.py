"""Constants: what depends on constants alone is computed at conversion."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS
from mlx_transmuter.runtime.module import evaluate_node

# Operators without inputs whose result is not the same each time.
_RANDOM_OPS = ("Random", "Bernoulli", "Multinomial")


def fold_constants(graph: GraphView) -> Iterator[MatchOutcome]:
    """A node whose inputs are all constants known on the host becomes the constants that it gives."""
    known = dict(graph.program.constants)
    for node in graph.nodes:
        reads = list(node.all_inputs())
        if node.op.startswith(_RANDOM_OPS) or not all(name in known for name in reads):
            continue
        try:
            results = evaluate_node(node, {name: known[name] for name in reads})
        except ops.OperatorError:
            continue  # the module says so when the node runs, if it ever does
        given = dict(zip(node.outputs, results, strict=False))
        given = {name: value for name, value in given.items() if name}
        if all(isinstance(value, np.ndarray) and value.size <= MAX_CONSTANT_ELEMENTS for value in given.values()):
            known |= given
            yield Replacement(node, (), constants=given)
