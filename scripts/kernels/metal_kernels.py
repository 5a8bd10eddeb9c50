"""How many kernels Metal dispatches for a graph: what is a view costs none, an input of the wrong layout a copy more.

The rules are those of MLX's Metal backend (host code of August 2026). An operation that its rules do not name counts as
one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .exported_graph import ExportedGraph, Operation
from .fusion import ELEMENTWISE, FusedOperation

# Operations that give another view of the same memory.
VIEWS = frozenset(
    """
    AsStrided Broadcast BroadcastAxes Copy Depends ExpandDims Flatten Slice Split Squeeze StopGradient Transpose
    Unflatten View
    """.split()  # noqa: SIM905
)
SORTS = frozenset(("Sort", "ArgSort", "Partition", "ArgPartition"))
# The longest axis that one kernel sorts, and the block of a longer one.
SORT_BLOCK = 4096


@dataclass(frozen=True)
class Kernel:
    """A kernel that Metal dispatches. name: of its operation. is_copy: it only brings an input into another layout."""

    name: str
    is_copy: bool = False


class Layout:
    """The strides of an array, in elements, as those of a view of a buffer that is never read."""

    def __init__(self, view: np.ndarray):
        self.view = view

    @staticmethod
    def contiguous(shape: Sequence[int]) -> Layout:
        """Returns the layout of an array that a kernel writes."""
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return Layout(_strided(shape, strides))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the order of the axes, without gaps."""
        return bool(self.view.flags.c_contiguous)

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie without gaps, in the order of some permutation of the axes."""
        axes = np.argsort([-stride for stride in self.view.strides], kind="stable")
        return bool(self.view.transpose(axes).flags.c_contiguous)

    def reshaped(self, shape: Sequence[int]) -> Layout | None:
        """Returns the layout of the array in another shape, or None where that needs a copy."""
        try:
            return Layout(np.reshape(self.view, tuple(shape), copy=False))
        except ValueError:
            return None


def _strided(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), tuple(shape), tuple(strides), writeable=False)


def metal_kernels(graph: ExportedGraph, operations: Sequence[Operation | FusedOperation]) -> list[Kernel]:
    """Returns the kernels of a graph whose operations are fused, in order."""
    counter = _Counter(graph)
    for operation in operations:
        counter.run(operation)
    return counter.kernels


class _Counter:
    def __init__(self, graph: ExportedGraph):
        self.graph = graph
        self.layouts: dict[str, Layout] = {}
        self.kernels: list[Kernel] = []

    def layout(self, name: str) -> Layout:
        """Returns the layout of an array; those that come from outside are contiguous."""
        if name not in self.layouts:
            self.layouts[name] = Layout.contiguous(self.graph.shapes[name])
        return self.layouts[name]

    def run(self, operation: Operation | FusedOperation) -> None:
        """Counts an operation's kernels, and takes down the layouts of what it gives."""
        if isinstance(operation, FusedOperation):
            for each in operation.operations:  # a broadcast that others read as well is there for them too
                if each.name in VIEWS:
                    self._view(each)
            self.kernels.append(Kernel("+".join(each.name for each in operation.operations if each.name not in VIEWS)))
            self._elementwise_layouts(operation.inputs, operation.outputs)
            return
        if operation.name == "Reshape":
            self._reshape(operation)
        elif operation.name in VIEWS:
            self._view(operation)
        else:
            for name in self._copied_inputs(operation):
                self.kernels.append(Kernel(f"{operation.name} of {name}", is_copy=True))
            self.kernels += [Kernel(operation.name)] * self._dispatches(operation)
            if operation.name in ELEMENTWISE:
                self._elementwise_layouts(operation.inputs, operation.outputs)

    def _reshape(self, operation: Operation) -> None:
        (given,), (name,) = operation.inputs[:1], operation.outputs
        layout = self.layout(given).reshaped(self.graph.shapes[name])
        if layout is None:
            self.kernels.append(Kernel(f"Reshape of {given}", is_copy=True))
        else:
            self.layouts[name] = layout

    def _view(self, operation: Operation) -> None:
        view, arguments = self.layout(operation.inputs[0]).view, operation.arguments
        shapes = [self.graph.shapes[name] for name in operation.outputs]
        if operation.name == "Transpose":
            views = [view.transpose(tuple(arguments[0]))]
        elif operation.name == "Slice":
            starts, stops, steps = arguments
            views = [view[tuple(slice(*ends) for ends in zip(starts, stops, steps, strict=True))]]
        elif operation.name == "Split":
            views = np.split(view, list(arguments[0]), axis=arguments[1])
        elif operation.name == "AsStrided":
            views = [_strided(arguments[0], arguments[1])]
        elif operation.name in ("Broadcast", "BroadcastAxes"):
            views = [np.broadcast_to(view, shapes[0])]
        elif operation.name == "View" and shapes[0] != view.shape:
            views = [Layout.contiguous(shapes[0]).view]
        else:
            views = [np.reshape(view, shapes[0])]  # axes of one element come and go
        for name, each, shape in zip(operation.outputs, views, shapes, strict=True):
            assert each.shape == shape, (operation, each.shape, shape)
            self.layouts[name] = Layout(each)

    def _elementwise_layouts(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Elementwise kernels keep the layout of their inputs where all have the same."""
        for output in outputs:
            shape = self.graph.shapes[output]
            same = [self.layout(name) for name in inputs if self.graph.shapes[name] == shape]
            strides = {layout.view.strides for layout in same}
            if len(strides) == 1 and same[0].is_dense:
                self.layouts[output] = same[0]

    def _copied_inputs(self, operation: Operation) -> list[str]:
        """Returns the inputs that the operation's kernel reads only after a copy."""
        check = {
            "Matmul": lambda i, layout: i > 1 or _is_matrix(layout.view),
            "AddMM": lambda i, layout: i > 1 or _is_matrix(layout.view),
            "GatherMM": lambda i, layout: i > 1 or _is_matrix(layout.view),
            "QuantizedMatmul": lambda _, layout: _is_packed(layout.view),
            "GatherQMM": lambda i, layout: i > 3 or _is_packed(layout.view),
            "rms_norm": lambda i, layout: i > 0 or _is_packed(layout.view),
            "layer_norm": lambda i, layout: i > 0 or _is_packed(layout.view),
            "Softmax": lambda _, layout: layout.is_dense and _last_stride(layout.view) == 1,
            "LogSumExp": lambda _, layout: layout.is_dense and _last_stride(layout.view) == 1,
            "rope": lambda i, layout: i > 0 or layout.is_contiguous or _is_heads_transposed(layout.view),
            "scaled_dot_product_attention": lambda i, layout: _attention_reads(i, layout),
        }.get(operation.name)
        if check is None:
            return []
        return [name for i, name in enumerate(operation.inputs) if not check(i, self.layout(name))]

    def _dispatches(self, operation: Operation) -> int:
        shapes = [self.graph.shapes[name] for name in operation.inputs]
        if operation.name == "Concatenate":
            return sum(1 for shape in shapes if prod(shape))
        if operation.name in SORTS:
            axis = operation.arguments[-1] if isinstance(operation.arguments[-1], int) else -1
            blocks = -(-shapes[0][axis] // SORT_BLOCK)
            # A long axis is sorted in blocks, which are merged two by two, each time after a search of where to part.
            return 1 if blocks == 1 else 2 + 2 * (blocks - 1).bit_length()
        if operation.name in ("DynamicSlice", "DynamicSliceUpdate"):
            return 2  # the offset is computed by a kernel of its own
        if operation.name == "scaled_dot_product_attention":
            return 2 if shapes[1][2] >= 1024 and shapes[0][2] <= 8 else 1  # long contexts are read in two passes
        return 1


def _last_stride(view: np.ndarray) -> int:
    return 1 if not view.ndim or view.shape[-1] == 1 else view.strides[-1]


def _is_packed(view: np.ndarray) -> bool:
    """Whether the rows of the last axis lie one after another."""
    if view.ndim < 2 or view.shape[-2] == 1:
        return _last_stride(view) == 1
    return _last_stride(view) == 1 and view.strides[-2] in (0, view.shape[-1])


def _is_matrix(view: np.ndarray) -> bool:
    """Whether the last two axes are a matrix or a transposed one, as products read them."""
    if view.ndim < 2:
        return True
    rows, columns = view.strides[-2:]
    if 1 in view.shape[-2:]:  # a vector
        return view[..., 0, :].strides[-1:] in ((1,), ()) or (
            view.shape[-1] == 1 and (rows == 1 or view.shape[-2] == 1)
        )
    return columns == 1 or rows == 1


def _is_heads_transposed(view: np.ndarray) -> bool:
    """Whether [rows, heads, seq, dim] lies as [rows, seq, heads, dim]."""
    return view.ndim == 4 and bool(view.transpose(0, 2, 1, 3).flags.c_contiguous)


def _attention_reads(i: int, layout: Layout) -> bool:
    """Whether the attention kernel reads its i-th input: queries, keys, values, then a mask or sinks."""
    view = layout.view
    if i == 0:
        return layout.is_contiguous or _is_heads_transposed(view)
    if i in (1, 2):
        return _last_stride(view) == 1
    return True
