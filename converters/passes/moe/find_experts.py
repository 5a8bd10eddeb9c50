"""Finds the experts of mixtures: subgraphs of one structure over one value, from that value to their outputs.

Exporters write an expert as layers of its own, or multiply all experts at once by weights of three axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import LayerView
from mlx_transmuter.converters.graph.linear_product import find_bias_add
from mlx_transmuter.converters.graph.operator_sets import COPY_OPS, ELEMENTWISE_OPS, FUSED_ACTIVATION_OPS, SLICING_OPS
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.slices import sliced_axis
from mlx_transmuter.converters.graph.subgraph import Subgraph
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES
from mlx_transmuter.program import Node

# The most steps of an expert, and the most nodes that copy the rows for each expert.
_MAX_STEPS = 24
# The constant that a Slice within an expert reads as its axes.
LAST_AXIS = "mixture.last_axis"


@dataclass(frozen=True)
class LayerProjection:
    """The product of x with the layer of one expert; `node` gives its result."""

    node: Node
    x: str
    path: str

    def structure(self, graph: GraphView) -> tuple:
        """What is equal for products whose layers fit into one stack: options, attributes, array types and shapes."""
        arrays = LayerView(graph.program).arrays(self.path)
        forms = tuple(sorted((part, array.dtype, array.shape) for part, array in arrays.items()))
        return tuple(sorted(graph.program.layers[self.path].items())), tuple(self.node.attrs.items()), forms


@dataclass(frozen=True)
class StackedProjection:
    """The product of x with the weights of all experts at once; `node` gives its result.

    weight: the name of [experts, in, out]. bias: the name of [experts, 1, out], "" for none.
    """

    node: Node
    x: str
    weight: str
    bias: str = ""

    def structure(self, graph: GraphView) -> tuple:
        """The names of the weights, which no other product shares."""
        return (self.weight, self.bias)

    def expert_count(self, graph: GraphView) -> int:
        return graph.program.tensors[self.weight].shape[0]


ExpertProjection = LayerProjection | StackedProjection
# A node between the projections stands for itself.
ExpertStep = Node | ExpertProjection


@dataclass(frozen=True)
class Expert:
    """The steps from x to an expert's output, the last one a projection; steps that a step reads come before it.

    structure: equal for experts that compute the same of their own weights.
    """

    x: str
    steps: tuple[ExpertStep, ...]
    structure: tuple[Any, ...]

    @property
    def projections(self) -> list[ExpertProjection]:
        return [step for step in self.steps if not isinstance(step, Node)]

    @property
    def output(self) -> str:
        return self.projections[-1].node.outputs[0]


@dataclass(frozen=True)
class Mixture:
    """Experts of one structure over x: an Expert each, or one Expert that computes all of them at once."""

    x: str
    experts: tuple[Expert, ...]
    expert_count: int

    @property
    def outputs(self) -> list[str]:
        """The results of the experts: [..., dim] each, or [experts, tokens, dim]."""
        return [expert.output for expert in self.experts]

    def without_shared_expert(self) -> list[Mixture]:
        """The mixture without its last or its first expert, which may be one for all tokens."""
        if self.is_stacked or self.expert_count < 3:
            return []
        return [Mixture(self.x, experts, self.expert_count - 1) for experts in (self.experts[:-1], self.experts[1:])]

    @property
    def is_stacked(self) -> bool:
        """Whether one Expert computes all experts at once."""
        return isinstance(self.experts[0].projections[0], StackedProjection)


def find_mixtures(graph: GraphView, probe: ShapeProbe) -> Iterator[Mixture]:
    """The mixtures of the graph, in its order."""
    groups: dict[tuple, list[Expert]] = {}
    for node in graph.nodes:
        last = _match_projection(graph, node)
        expert = _ExpertTracer(graph, probe).trace(last) if last is not None else None
        if last is None or expert is None:
            continue
        if isinstance(last, StackedProjection):
            x = _shared_rows(graph, probe, expert.x, last.expert_count(graph))
            if x is not None:
                groups[expert.output,] = [replace(expert, x=x)]
            continue
        # An expert for all tokens, of the same structure, is weighed or added by other operators.
        reader_ops = tuple(sorted(reader.op for reader in graph.consumers(expert.output)))
        groups.setdefault((expert.x, expert.structure, reader_ops), []).append(expert)
    for experts in groups.values():
        last = experts[0].projections[-1]
        count = last.expert_count(graph) if isinstance(last, StackedProjection) else len(experts)
        if count > 1:
            yield Mixture(experts[0].x, tuple(experts), count)


def _match_projection(graph: GraphView, node: Node) -> ExpertProjection | None:
    """The projection whose result the node gives: a product, or the Add of a bias to it."""
    if is_op_type(node, "mlx.linear"):
        return LayerProjection(node, node.inputs[0], node.inputs[1])
    if is_op_type(node, "MatMul") and _is_expert_stack(graph, node.inputs[1]):
        has_bias = find_bias_add(graph, node, _bias_shape(graph, node)) is not None  # then the Add is the projection
        return None if has_bias else StackedProjection(node, node.inputs[0], node.inputs[1])
    if is_op_type(node, "Add"):
        for product in (graph.producer(name, "MatMul") for name in node.inputs):
            if product is None or not _is_expert_stack(graph, product.inputs[1]):
                continue
            bias_add = find_bias_add(graph, product, _bias_shape(graph, product))
            if bias_add is not None:
                return StackedProjection(node, product.inputs[0], product.inputs[1], bias_add.bias)
    return None


def _is_expert_stack(graph: GraphView, name: str) -> bool:
    tensor = graph.weight(name)
    return tensor is not None and len(tensor.shape) == 3 and tensor.dtype in LAYER_FLOAT_TYPES


def _bias_shape(graph: GraphView, product: Node) -> tuple[int, ...]:
    """The shape of the biases of all experts, [experts, 1, out]."""
    experts, _, out = graph.program.tensors[product.inputs[1]].shape
    return experts, 1, out


@dataclass
class _ExpertTracer:
    """Collects the steps of one expert, from its last projection back to the value that all its projections read."""

    graph: GraphView
    probe: ShapeProbe
    x: str = ""
    steps: list[ExpertStep] = field(default_factory=list)
    step_structures: list[Any] = field(default_factory=list)
    value_numbers: dict[str, int] = field(default_factory=dict)  # a value -> how many values came before it

    def trace(self, last: ExpertProjection) -> Expert | None:
        """The expert whose last projection this is; None where anything but steps of an expert leads to it."""
        if not self.visit(last.x) or not self.x or not isinstance(self.steps[0], type(last)):
            return None
        self.add_step(last, [self.value_numbers[last.x]])
        return Expert(self.x, tuple(self.steps), tuple(self.step_structures))

    def visit(self, name: str) -> bool:
        """Adds the steps that compute the value. Returns whether these are steps of an expert."""
        if name in self.value_numbers:
            return True
        node = self.graph.producer(name)
        if node is None or len(self.steps) == _MAX_STEPS:
            return False
        projection = _match_projection(self.graph, node)
        if projection is not None:
            if self.x not in ("", projection.x):
                return False
            self.x = projection.x
            self.add_step(projection, [])
            return True
        if not self.is_rowwise(node):
            return False
        for i, value in enumerate(node.inputs):
            constant = self.graph.constant(value)
            if constant is not None:
                if constant.size > 1 and (i == 0 or not is_op_type(node, *SLICING_OPS)):
                    return False
            elif value and not self.visit(value):
                return False
        self.add_step(node, [self.input_structure(value) for value in node.inputs])
        return True

    def input_structure(self, value: str) -> Any:
        """What is equal for a step's input in experts that compute the same: a constant, or the number of a value."""
        constant = self.graph.constant(value)
        if constant is not None:
            return constant.dtype.str, constant.tobytes()
        return self.value_numbers[value] if value else None

    def is_rowwise(self, node: Node) -> bool:
        """Whether each row of the result depends on one row of the inputs."""
        if is_op_type(node, *FUSED_ACTIVATION_OPS, *ELEMENTWISE_OPS):
            return True
        return is_op_type(node, *SLICING_OPS) and normalize_last_axis(self.graph, self.probe, node) is not None

    def add_step(self, step: ExpertStep, input_structure: list[Any]) -> None:
        """Adds a step whose inputs have that structure: numbers of values, constants, None for an absent one."""
        if isinstance(step, Node):
            node, structure = step, (step.op, tuple((key, repr(value)) for key, value in sorted(step.attrs.items())))
        else:
            node, structure = step.node, step.structure(self.graph)
        self.steps.append(step)
        self.step_structures.append((structure, tuple(input_structure)))
        for name in node.outputs:
            self.value_numbers[name] = len(self.value_numbers)


def normalize_last_axis(graph: GraphView, probe: ShapeProbe, node: Node) -> Node | None:
    """A Split or Slice of the last axis, written so that it splits rows of any rank; None for another axis.

    A Slice reads its axes from the constant LAST_AXIS.
    """
    shapes = probe.shapes(node.inputs[0])
    if shapes is None or sliced_axis(graph, probe, node) != len(shapes[0]) - 1:
        return None
    if is_op_type(node, "Split"):
        return replace(node, attrs={**node.attrs, "axis": -1})
    return replace(node, inputs=(*node.inputs[:3], LAST_AXIS, *node.inputs[4:]))


def _shared_rows(graph: GraphView, probe: ShapeProbe, name: str, expert_count: int) -> str | None:
    """The rows [..., dim] of which the value [experts, tokens, dim] holds a copy for each expert; None where it holds
    no such copies.
    """
    source, copied_shapes = name, probe.shapes(name)
    if copied_shapes is None or any(len(shape) != 3 or shape[0] != expert_count for shape in copied_shapes):
        return None
    while (node := graph.producer(source)) is not None and is_op_type(node, *COPY_OPS):
        source = node.inputs[0]
        shapes = probe.shapes(source)
        if shapes is None:
            return None
        if all(
            math.prod(shape) * expert_count == math.prod(copied) and shape[-1] == copied[-1]
            for shape, copied in zip(shapes, copied_shapes, strict=True)
        ):
            return source if _copies_rows(graph, probe, source, name) else None
    return None


def _copies_rows(graph: GraphView, probe: ShapeProbe, source: str, copies: str) -> bool:
    """Whether `copies` [experts, tokens, dim] repeats the rows of `source` for each expert, tried on random numbers."""
    step_values = probe.step_values[0]
    subgraph = Subgraph.collect(graph, step_values, copies, {source}, _MAX_STEPS)
    if subgraph is None:
        return False
    shape = step_values[source].shape
    rows = mx.random.normal(shape, key=mx.random.key(0)).astype(step_values[source].dtype)
    result = subgraph.evaluate({source: rows})
    expected = mx.broadcast_to(rows.reshape(1, -1, shape[-1]), step_values[copies].shape)
    return result is not None and bool(mx.array_equal(result, expected))
