"""Constants: what depends on constants alone is computed at conversion."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.constant_budget import ConstantBudget
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.operator_sets import RANDOM_OPS
from mlx_transmuter.converters.graph.rewriting import MatchOutcome, Replacement
from mlx_transmuter.converters.graph.subgraph import evaluate_nodes
from mlx_transmuter.program import MAX_CONSTANT_ELEMENTS


def fold_constants(graph: GraphView) -> Iterator[MatchOutcome]:
    """Replaces a node whose inputs are all constants by its outputs, where they are small and on the host."""
    constants, budget = dict(graph.program.constants), ConstantBudget()
    for node in graph.nodes:
        inputs = list(node.all_inputs())
        if is_op_type(node, *RANDOM_OPS) or not all(name in constants for name in inputs):
            continue
        try:
            results = evaluate_nodes([node], {name: constants[name] for name in inputs})
        except ops.OperatorError:
            continue  # the module raises it when the node runs, if it ever does
        outputs = {name: value for name, value in results.items() if name}
        is_small = all(isinstance(v, np.ndarray) and v.size <= MAX_CONSTANT_ELEMENTS for v in outputs.values())
        if is_small and budget.take(outputs.values()):
            constants |= outputs
            yield Replacement(node, (), constants=outputs)
