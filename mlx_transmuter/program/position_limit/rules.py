"""What operators make of bounds: the integers and the sizes of their results, from those of their inputs.

A rule is a function of a NodeBounds that returns the Bounds of the results, or of the first one alone. An operator
without a rule gives values of which nothing is known.
"""

from __future__ import annotations

# The imports declare the rules.
from mlx_transmuter.program.position_limit import number_rules, shape_rules  # noqa: F401
from mlx_transmuter.program.position_limit.bounds import UNKNOWN, Bounds
from mlx_transmuter.program.position_limit.node_bounds import RULES, NodeBounds


def apply_rule(view: NodeBounds) -> list[Bounds]:
    """Returns the bounds of a node's outputs, of which those of a node that asks the impossible are unknown: it fails
    where it runs."""
    try:
        results = RULES.get(view.node.op_type, _unknown)(view)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        results = UNKNOWN
    results = [results.limit()] if isinstance(results, Bounds) else [result.limit() for result in results]
    return results + [UNKNOWN] * (len(view.node.outputs) - len(results))


def _unknown(view: NodeBounds) -> Bounds:
    return UNKNOWN
