"""Which elementwise operations mx.compile makes one kernel of, by the rules of MLX's `compile_fuse` (0.32)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .exported_graph import ExportedGraph, Operation

MAX_DEPTH, MAX_ARRAYS = 11, 24

_UNARY = """
    Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate Cos Cosh Erf ErfInv Exp Expm1
    Floor Imag Log Log1p LogicalNot Negative Real Round Sigmoid Sign Sin Sinh Sqrt Square Tan Tanh
""".split()  # noqa: SIM905
_BINARY = """
    Add ArcTan2 BitwiseBinary Divide Equal Greater GreaterEqual Less LessEqual LogAddExp LogicalAnd LogicalOr Maximum
    Minimum Multiply NotEqual Power Remainder Subtract
""".split()  # noqa: SIM905
ELEMENTWISE = frozenset((*_UNARY, *_BINARY, "Select"))
_BROADCAST = "Broadcast"
_FUSABLE = ELEMENTWISE | {_BROADCAST, "Copy", "StopGradient"}


@dataclass(frozen=True)
class FusedOperation:
    """Operations that run as one kernel, in order; `inputs` and `outputs` are what it reads and writes."""

    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def fuse(graph: ExportedGraph, *, regions_alone: bool = False) -> list[Operation | FusedOperation]:
    """Returns the operations of a graph with those that are fused together, in an order in which they can run.

    regions_alone: nothing is compiled but the functions that the model compiles by itself.
    """
    return _Fuser(graph, regions_alone).run()


class _Fuser:
    def __init__(self, graph: ExportedGraph, regions_alone: bool):
        self.graph, self.regions_alone = graph, regions_alone
        self.makers = {name: operation for operation in graph.operations for name in operation.outputs}
        self.users: dict[str, list[Operation]] = defaultdict(list)
        for operation in graph.operations:
            for name in operation.inputs:
                self.users[name].append(operation)
        self.graph_outputs = set(graph.outputs)
        self.done: set[int] = set()

    def run(self) -> list[Operation | FusedOperation]:
        """Returns the operations, fused."""
        tape: list[Operation | FusedOperation] = []
        for operation in reversed(self.graph.operations):
            if id(operation) in self.done:
                continue
            cache = self._section(operation) if operation.name != _BROADCAST else {}
            if len(cache) <= 1:
                tape.append(operation)
                continue
            tape.append(self._fused(cache))
        return tape[::-1]

    def _is_fusable(self, operation: Operation) -> bool:
        return operation.name in _FUSABLE and (bool(operation.region) or not self.regions_alone)

    def _section(self, root: Operation) -> dict[int, Operation]:
        """Returns the operations that run with one, by id."""
        cache: dict[int, Operation] = {}
        inputs: set[str] = set()
        shape = self.graph.shapes[root.outputs[0]]

        def visit(name: str, depth: int) -> None:
            operation = self.makers.get(name)
            if operation is not None and id(operation) in cache:
                return
            if depth >= MAX_DEPTH or operation is None or not self._is_fusable(operation):
                inputs.add(name)
                return
            if operation.region != root.region or (name in self.graph_outputs and self.graph.shapes[name] != shape):
                inputs.add(name)
                return
            if depth and any(id(user) not in cache for user in self.users[name]):
                inputs.add(name)
                if operation.name != _BROADCAST:
                    return
            if name in self.graph_outputs:
                inputs.add(name)
            else:
                inputs.discard(name)
            if len(inputs) >= MAX_ARRAYS:
                return
            cache[id(operation)] = operation
            for each in operation.inputs:
                visit(each, depth + 1)

        visit(root.outputs[0], 0)
        return cache

    def _fused(self, cache: dict[int, Operation]) -> FusedOperation:
        # A broadcast that others read as well is in the section and stays outside too.
        members = [operation for operation in self.graph.operations if id(operation) in cache]
        inside = {name for operation in members for name in operation.outputs}
        read = dict.fromkeys(name for operation in members for name in operation.inputs if name not in inside)
        written = [
            name
            for operation in members
            for name in operation.outputs
            if operation.name != _BROADCAST
            and (name in self.graph_outputs or any(id(user) not in cache for user in self.users[name]))
        ]
        split = {
            id(operation)
            for operation in members
            if operation.name == _BROADCAST
            and any(id(user) not in cache for name in operation.outputs for user in self.users[name])
        }
        self.done |= set(cache) - split
        return FusedOperation(tuple(members), tuple(read), tuple(written))
