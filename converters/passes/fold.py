"""Constants: what depends on constants alone is computed at conversion."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from converters.match import Answer, Become, Graph
from mlx_transmuter import ops
from mlx_transmuter.module import evaluate
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS

# Operators without inputs whose result is not the same each time.
_RANDOM = ("Random", "Bernoulli", "Multinomial")


def fold(graph: Graph) -> Iterator[Answer]:
    """A node whose inputs are all constants known on the host becomes the constants that it gives."""
    known = dict(graph.program.constants)
    for node in graph.nodes:
        reads = list(node.reads())
        if node.op.startswith(_RANDOM) or not all(name in known for name in reads):
            continue
        try:
            results = evaluate(node, {name: known[name] for name in reads})
        except ops.OperatorError:
            continue  # the module says so when the node runs, if it ever does
        given = dict(zip(node.outputs, results, strict=False))
        given = {name: value for name, value in given.items() if name}
        if all(isinstance(value, np.ndarray) and value.size <= MAX_CONSTANT_ELEMENTS for value in given.values()):
            known |= given
            yield Become(node, (), constants=given)
