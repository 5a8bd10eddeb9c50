"""The check of a program: each name is defined once, and before it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlx_transmuter.program.errors import ProgramError
from mlx_transmuter.program.onnx_dtypes import ONNX_DTYPES

if TYPE_CHECKING:
    from mlx_transmuter.program.program import Node, Program


def check_program(
    program: Program, where: str, outer_values: frozenset[str], is_known_operator: Callable[[str], bool] | None
) -> None:
    """Raises ProgramError for a malformed program; see Program.validate."""
    scope = _Scope(where, outer_values, is_known_operator)
    scope.define_inputs(program)
    scope.define_tables(program)
    for node in program.nodes:
        scope.check_node(node)
        scope.define_outputs(node)
    scope.check_outputs(program)


class _Scope:
    """The names that are defined so far at one level of a program, those of the levels around it included."""

    def __init__(self, where: str, outer_values: frozenset[str], is_known_operator: Callable[[str], bool] | None):
        self.where, self.is_known_operator = where, is_known_operator
        self.defined = set(outer_values)

    def define(self, name: str, what: str) -> None:
        if name in self.defined:
            found = f"the value {name!r} defined again by {what}"
            raise ProgramError(self.where, found, "each value defined once")
        self.defined.add(name)

    def define_inputs(self, program: Program) -> None:
        for value in program.inputs:
            self.define(value.name, "an input")
            if value.dtype not in ONNX_DTYPES:
                found = f"the type {value.dtype!r} of input {value.name!r}"
                raise ProgramError(self.where, found, "an ONNX tensor type")

    def define_tables(self, program: Program) -> None:
        tables = {"a constant": program.constants, "a weight": program.weights, "a layer": program.layers}
        for what, table in tables.items():
            for name in table:
                self.define(name, what)

    def define_outputs(self, node: Node) -> None:
        for name in node.outputs:
            if name:
                self.define(name, f"node {node}")

    def check_node(self, node: Node) -> None:
        if self.is_known_operator and not self.is_known_operator(node.op):
            raise ProgramError(self.where, f"the operator {node.op!r}", "an operator that this version declares")
        for name in node.inputs:
            if name and name not in self.defined:
                raise ProgramError(self.where, f"node {node} reading {name!r}", "a value defined before it is read")
        for branch in node.subprograms():
            if branch.weights or branch.layers:
                found = f"weights inside a branch of {node}"
                raise ProgramError(self.where, found, "weights in the outermost program only")
            where = f"{self.where}, a branch of {node}"
            check_program(branch, where, frozenset(self.defined), self.is_known_operator)

    def check_outputs(self, program: Program) -> None:
        for value in program.outputs:
            if value.name not in self.defined or value.name in program.layers:
                found = f"no node that computes the output {value.name!r}"
                raise ProgramError(self.where, found, "every output computed")
