"""The operations of a function of arrays as MLX exports them, each function of mx.fast as one operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

# The functions that have a kernel of their own on Metal. The CPU backend expands them while a function is traced, so
# what they expand to stands between marks, choices that are none: `where(True, array, code)`.
FAST_FUNCTIONS = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
COMPILED = "compiled"  # the mark of a function that its model compiles by itself
_MARKED = (*FAST_FUNCTIONS, COMPILED)
_ENTRY = "entry"


@dataclass(frozen=True)
class Operation:
    """An operation of a graph.

    name: MLX's name of the primitive, or that of a function of mx.fast. arguments: what MLX exports of its state.
    inputs, outputs: names of arrays. region: which function that is compiled by itself it stands in; 0 for none.
    """

    name: str
    arguments: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    region: int = 0


@dataclass(frozen=True)
class ExportedGraph:
    """The operations of a function in the order in which they can run.

    shapes, dtypes: of each array by name. constants: the arrays known when it was traced. outputs: what it returns.
    """

    operations: list[Operation]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, mx.Dtype]
    constants: dict[str, mx.array]
    outputs: tuple[str, ...]


def export_graph(function: Callable[..., Any], *args: Any) -> ExportedGraph:
    """Returns the graph of a function for arguments whose arrays may lie in lists, tuples and dicts."""
    return _merge_marked(_read_parts(export_parts(function, *args)))


def export_parts(function: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
    """Returns what MLX exports of such a function: its constants and its operations."""
    leaves = [leaf for _, leaf in tree_flatten(list(args)) if isinstance(leaf, mx.array)]

    def function_of_leaves(*arrays: mx.array) -> tuple[mx.array, ...]:
        left = iter(arrays)
        actual = function(*tree_map(lambda leaf: next(left) if isinstance(leaf, mx.array) else leaf, list(args)))
        return tuple(leaf for _, leaf in tree_flatten(actual) if isinstance(leaf, mx.array))

    parts: list[dict[str, Any]] = []
    mx.export_function(parts.append, function_of_leaves, *leaves)
    return parts


def _read_parts(parts: Sequence[dict[str, Any]]) -> ExportedGraph:
    graph = ExportedGraph([], {}, {}, {}, ())
    for part in parts:
        arrays = [*part.get("inputs", ()), *part.get("outputs", ())]
        graph.shapes.update({name: tuple(shape) for name, shape, _ in arrays})
        graph.dtypes.update({name: dtype for name, _, dtype in arrays})
        if part["type"] == "constants":
            graph.constants.update(part["constants"])
            graph.shapes.update({name: tuple(array.shape) for name, array in part["constants"]})
            graph.dtypes.update({name: array.dtype for name, array in part["constants"]})
        elif part["type"] == "outputs":
            graph = replace(graph, outputs=tuple(name for name, _, _ in part["outputs"]))
        elif part["type"] == "primitive":
            inputs, outputs = (tuple(name for name, _, _ in part[side]) for side in ("inputs", "outputs"))
            graph.operations.append(Operation(part["name"], tuple(part["arguments"]), inputs, outputs))
    return graph


# Marks.

_ENTRY_CODE = 2.0**-9


def _mark(array: mx.array, code: float) -> mx.array:
    """Returns the array with a mark on it: a power of two, which is exact in every float type, or True."""
    return mx.where(mx.array(True), array, mx.array(code, array.dtype))


def _exit_code(name: str) -> float:
    return 2.0 ** -(10 + _MARKED.index(name))


def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the same, and of which the exported graph has one operation of that name."""

    def mark_input(leaf: Any) -> Any:
        return _mark(leaf, _ENTRY_CODE) if isinstance(leaf, mx.array) else leaf

    def mark_output(leaf: Any) -> Any:
        is_float = isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
        return _mark(leaf, _exit_code(name)) if is_float else leaf

    def call(*args: Any, **options: Any) -> Any:
        args, options = tree_map(mark_input, [list(args), options])
        return tree_map(mark_output, function(*args, **options))

    return call


@contextmanager
def fast_functions_marked() -> Iterator[None]:
    """The functions of mx.fast, marked."""
    functions = {name: getattr(mx.fast, name) for name in FAST_FUNCTIONS}
    try:
        for name, function in functions.items():
            setattr(mx.fast, name, marked(name, function))
        yield
    finally:
        for name, function in functions.items():
            setattr(mx.fast, name, function)


def _merge_marked(graph: ExportedGraph) -> ExportedGraph:
    """Returns the graph with what stands between marks as one operation, or as a region of its own."""
    makers = {name: operation for operation in graph.operations for name in operation.outputs}
    marks = {id(operation): _mark_of(graph, makers, operation) for operation in graph.operations}
    merged: dict[int, tuple[str, list[str]]] = {}  # the operation that marks an output: its name and inputs
    hidden: set[int] = set()
    regions: dict[int, int] = {}
    for i, operation in enumerate(graph.operations):
        name = marks[id(operation)]
        if name is None or name == _ENTRY:
            continue
        inside, entries = _between_marks(makers, marks, operation.inputs[1])
        if name == COMPILED:
            regions |= {id(each): i + 1 for each in inside}
        else:
            hidden |= {id(each) for each in inside}
            merged[id(operation)] = (name, entries)
    operations: list[Operation] = []
    same: dict[str, str] = {}  # what a mark gives: the array that it was put on
    for operation in graph.operations:
        inputs = tuple(same.get(name, name) for name in operation.inputs)
        if id(operation) in merged:
            name, entries = merged[id(operation)]
            entries = tuple(same.get(entry, entry) for entry in entries)
            operations.append(Operation(name, (), entries, operation.outputs))
        elif marks[id(operation)] is not None:
            same[operation.outputs[0]] = inputs[1]
        elif id(operation) not in hidden:
            operations.append(replace(operation, inputs=inputs, region=regions.get(id(operation), 0)))
    outputs = tuple(same.get(name, name) for name in graph.outputs)
    return replace(graph, operations=_reachable(operations, outputs), outputs=outputs)


def _mark_of(graph: ExportedGraph, makers: dict[str, Operation], operation: Operation) -> str | None:
    """Returns the name of the function whose output the operation marks, or that it marks an input."""
    if operation.name != "Select" or _scalar(graph, makers, operation.inputs[0]) is not True:
        return None
    code = _scalar(graph, makers, operation.inputs[2])
    return next((name for name in _MARKED if code == _exit_code(name)), _ENTRY)


def _scalar(graph: ExportedGraph, makers: dict[str, Operation], name: str) -> float | bool | None:
    while name in makers and makers[name].name in ("Broadcast", "AsType"):
        name = makers[name].inputs[0]
    constant = graph.constants.get(name)
    return constant.item() if constant is not None and constant.size == 1 else None  # type: ignore[return-value]


def _between_marks(
    makers: dict[str, Operation], marks: dict[int, str | None], output: str
) -> tuple[list[Operation], list[str]]:
    """Returns the operations from an output back to the marks of what goes in, and the arrays that go in."""
    inside: dict[int, Operation] = {}
    entries: dict[str, None] = {}
    left = [output]
    while left:
        operation = makers.get(left.pop())
        if operation is None or id(operation) in inside:
            continue
        if marks[id(operation)] == _ENTRY:
            entries[operation.inputs[1]] = None
        else:
            inside[id(operation)] = operation
            left += reversed(operation.inputs)
    return list(inside.values()), list(entries)


def _reachable(operations: list[Operation], outputs: Sequence[str]) -> list[Operation]:
    """Returns the operations that the outputs need."""
    needed, kept = set(outputs), list[Operation]()
    for operation in reversed(operations):
        if not needed.isdisjoint(operation.outputs):
            needed.update(operation.inputs)
            kept.append(operation)
    return kept[::-1]
