"""NodeBounds: a node with the bounds of its inputs, which rules take; and the table of rules, by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_transmuter.program.position_limit.bounds import UNKNOWN, Bounds
from mlx_transmuter.program.position_limit.lengths import Length, TokenRange
from mlx_transmuter.program.program import Node


class NodeBounds:
    """A node with the bounds of its inputs.

    bounds_of: returns the bounds of any value by name. tokens: the rows that are looked at. splits: where a comparison
    depends on the tokens of a row, its last tokens before it changes, for the walk to look at both sides.
    """

    def __init__(
        self,
        node: Node,
        inputs: list[Bounds],
        bounds_of: Callable[[str], Bounds],
        tokens: TokenRange,
        splits: set[int],
    ):
        self.node, self.inputs, self.bounds_of, self.tokens, self.splits = node, inputs, bounds_of, tokens, splits

    def input(self, number: int) -> Bounds:
        """Returns the bounds of an input; UNKNOWN for one that is left out."""
        return self.inputs[number] if number < len(self.inputs) else UNKNOWN

    def has_input(self, number: int) -> bool:
        """Whether the node has the input."""
        return number < len(self.node.inputs) and bool(self.node.inputs[number])

    def integers(self, attribute: str, number: int | None = None) -> list[int] | None:
        """Returns the constant integers of an attribute, else of an input; None where there are none."""
        value = self.node.attrs.get(attribute)
        if isinstance(value, int):
            return [value]
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            return list(value)
        return None if number is None else self.input(number).as_constants

    def is_positive(self, number: Length) -> bool | None:
        """Whether a number is above 0 in all rows that are looked at; None where that differs."""
        is_positive = self.tokens.is_positive(number)
        if is_positive is None and (split := number.changes_sign_after) is not None:
            self.splits.add(split)
        return is_positive


Rule = Callable[[NodeBounds], Any]
RULES: dict[str, Rule] = {}


def declare_rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Decorates the rule of operators."""

    def declare(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, function))
        return function

    return declare
