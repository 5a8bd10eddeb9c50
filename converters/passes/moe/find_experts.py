"""Mixtures: the alike experts over one value, one by one or all at once, as far as their own outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.subgraph import Subgraph
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LAYER_FLOAT_TYPES
from mlx_transmuter.program import Node

# What stands between an expert's first products and its last, and takes each element or each row by itself.
_ELEMENTWISE_OPS = (
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Pow", "Sqrt", "Exp", "Min", "Max", "Clip", "Cast", "Identity"),
    *("Sigmoid", "Tanh", "Erf", "Relu", "LeakyRelu", "Elu", "Gelu", "Swish", "HardSwish", "Softplus", "Mish"),
    *(f"com.microsoft.{name}" for name in ("Gelu", "FastGelu", "QuickGelu")),
)
_SLICING_OPS = ("Split", "Slice")
# What gives all experts the same rows.
_COPYING_OPS = ("Tile", "Expand", "Reshape", "Unsqueeze", "Squeeze", "Identity")
_MAX_STEPS = 24


@dataclass(frozen=True)
class ExpertProjection:
    """A product of x and its output's node: of one expert, by its layer's path; or of all of them at once, by the names
    of the weight [experts, in, out] and the bias [experts, 1, out], "" for none.
    """

    node: Node
    x: str
    path: str = ""
    weight: str = ""
    bias: str = ""


ExpertStep = Node | ExpertProjection


@dataclass(frozen=True)
class Expert:
    """The steps from x to an expert's output, the last one a Projection; words: the same for experts that are alike."""

    x: str
    steps: tuple[ExpertStep, ...]
    structure: tuple[Any, ...]

    @property
    def output(self) -> str:
        return self.steps[-1].node.outputs[0]  # type: ignore[union-attr]

    @property
    def projections(self) -> list[ExpertProjection]:
        return [step for step in self.steps if isinstance(step, ExpertProjection)]


@dataclass(frozen=True)
class Mixture:
    """Alike experts over x: one Expert each, or one for all of them at once. count: of experts."""

    x: str
    experts: tuple[Expert, ...]
    expert_count: int

    @property
    def outputs(self) -> list[str]:
        """What the experts give: [..., dim] each, or [count, tokens, dim]."""
        return [expert.output for expert in self.experts]

    def without_shared_expert(self) -> list[Mixture]:
        """The mixture without its last or its first expert, which may be one for all tokens, of the others' form."""
        if self.is_stacked or self.expert_count < 3:
            return []
        return [Mixture(self.x, part, self.expert_count - 1) for part in (self.experts[:-1], self.experts[1:])]

    @property
    def is_stacked(self) -> bool:
        return bool(self.experts[0].projections[0].weight)


def find_mixtures(graph: GraphView, probe: ShapeProbe) -> Iterator[Mixture]:
    """The mixtures of the graph, in its order."""
    groups: dict[tuple, list[Expert]] = {}
    for node in graph.nodes:
        last = _match_projection(graph, node)
        expert = _ExpertTracer(graph, probe).trace(last) if last is not None else None
        if last is None or expert is None:
            continue
        if last.weight:
            count = graph.program.tensors[last.weight].shape[0]
            x = _shared_rows(graph, probe, expert.x, count)
            if x is not None:
                groups[expert.output,] = [Expert(x, expert.steps, expert.structure)]
            continue
        # An expert for all tokens, of the same form, is weighed or added otherwise.
        after = tuple(sorted(one.op for one in graph.consumers(expert.output)))
        groups.setdefault((expert.x, expert.structure, after), []).append(expert)
    for experts in groups.values():
        last = experts[0].projections[-1]
        count = graph.program.tensors[last.weight].shape[0] if last.weight else len(experts)
        if count > 1:
            yield Mixture(experts[0].x, tuple(experts), count)


def _match_projection(graph: GraphView, node: Node) -> ExpertProjection | None:
    if node.op == "mlx.linear":
        return ExpertProjection(node, node.inputs[0], node.inputs[1])
    if is_op_type(node, "MatMul") and _is_expert_stack(graph, node.inputs[1]):
        after = graph.only_consumer(node.outputs[0])
        if after is None or not _match_stacked_bias(graph, after, node):  # a product comes with its bias
            return ExpertProjection(node, node.inputs[0], "", node.inputs[1])
    if is_op_type(node, "Add"):
        for name in node.inputs:
            product = graph.producer(name, "MatMul")
            if (
                product is not None
                and _is_expert_stack(graph, product.inputs[1])
                and (bias := _match_stacked_bias(graph, node, product))
            ):
                return ExpertProjection(node, product.inputs[0], "", product.inputs[1], bias)
    return None


def _is_expert_stack(graph: GraphView, name: str) -> bool:
    tensor = graph.weight(name)
    return tensor is not None and len(tensor.shape) == 3 and tensor.dtype in LAYER_FLOAT_TYPES


def _match_stacked_bias(graph: GraphView, node: Node, product: Node) -> str:
    """The weight [experts, 1, out] that the Add `node` adds to the product, "" for none."""
    if not is_op_type(node, "Add") or graph.only_consumer(product.outputs[0]) is not node:
        return ""
    experts, _, width = graph.program.tensors[product.inputs[1]].shape
    names = [name for name in node.inputs if name != product.outputs[0]]
    tensor = graph.weight(names[0]) if names else None
    return names[0] if tensor is not None and tensor.shape == (experts, 1, width) else ""


@dataclass
class _ExpertTracer:
    """The steps behind an expert's last product, found from there: a step comes after those that it reads."""

    graph: GraphView
    probe: ShapeProbe
    x: str = ""
    steps: list[ExpertStep] = field(default_factory=list)
    structure_parts: list[Any] = field(default_factory=list)
    value_numbers: dict[str, int] = field(default_factory=dict)  # a value -> how many came before it

    def trace(self, last_projection: ExpertProjection) -> Expert | None:
        """The expert whose last product this is; None where something else than an expert's own steps lies behind."""
        if not self.visit(last_projection.x) or not self.x or bool(last_projection.path) != bool(self.steps[0].path):  # type: ignore[union-attr]
            return None
        self.add_step(last_projection, last_projection.node, [self.value_numbers[last_projection.x]])
        return Expert(self.x, tuple(self.steps), tuple(self.structure_parts))

    def visit(self, name: str) -> bool:
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
            self.add_step(projection, node, [])
            return True
        if not self.is_rowwise(node):
            return False
        given = []
        for i, one in enumerate(node.inputs):
            constant = self.graph.constant(one)
            if constant is not None or not one:
                if constant is not None and constant.size > 1 and (i == 0 or not is_op_type(node, *_SLICING_OPS)):
                    return False
                given.append((constant.dtype.str, constant.tobytes()) if constant is not None else None)
            elif self.visit(one):
                given.append(self.value_numbers[one])
            else:
                return False
        self.add_step(node, node, given)
        return True

    def is_rowwise(self, node: Node) -> bool:
        """Whether the node takes each row by itself."""
        if node.op in ("mlx.gate", "mlx.activate") or is_op_type(node, *_ELEMENTWISE_OPS):
            return True
        return is_op_type(node, *_SLICING_OPS) and normalize_last_axis(self.graph, self.probe, node) is not None

    def add_step(self, step: ExpertStep, node: Node, input_structure: list[Any]) -> None:
        what = node.op, tuple((key, repr(value)) for key, value in sorted(node.attrs.items()))
        if isinstance(step, ExpertProjection):
            what = _projection_structure(self.graph, step)
        self.steps.append(step)
        self.structure_parts.append((what, tuple(input_structure)))
        for name in node.outputs:
            self.value_numbers[name] = len(self.value_numbers)


def _projection_structure(graph: GraphView, step: ExpertProjection) -> tuple:
    """What is the same for products whose weights fit into one stack."""
    if step.weight:
        return (step.weight, step.bias)
    start = f"{step.path}."
    arrays = {name[len(start) :]: one for name, one in graph.program.tensors.items() if name.startswith(start)}
    kinds = tuple(sorted((name, one.dtype, one.shape) for name, one in arrays.items()))
    return tuple(sorted(graph.program.layers[step.path].items())), tuple(step.node.attrs.items()), kinds


def normalize_last_axis(graph: GraphView, probe: ShapeProbe, node: Node) -> Node | None:
    """A Split or Slice of the last axis, written so that it is one of rows of any rank; None for another axis. What it
    reads as its axes is the constant `LAST`."""
    shapes = probe.shapes(node.inputs[0])
    if shapes is None:
        return None
    ends = (-1, len(shapes[0]) - 1)
    if is_op_type(node, "Split"):
        attrs = {**node.attrs, "axis": -1}
        return Node(node.op, node.inputs, node.outputs, attrs, node.name) if node.attrs.get("axis", 0) in ends else None
    axes = graph.constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
    if axes is None or axes.size != 1 or int(axes.item()) not in ends:
        return None
    return Node(node.op, (*node.inputs[:3], LAST_AXIS, *node.inputs[4:]), node.outputs, node.attrs, node.name)


LAST_AXIS = "mixture.last_axis"


def _shared_rows(graph: GraphView, probe: ShapeProbe, name: str, expert_count: int) -> str | None:
    """The rows [..., dim] of which the value [count, tokens, dim] has a copy for each expert; None where it hasn't."""
    source, whole = name, probe.shapes(name)
    if whole is None or any(len(shape) != 3 or shape[0] != expert_count for shape in whole):
        return None
    while (node := graph.producer(source)) is not None and is_op_type(node, *_COPYING_OPS):
        source = node.inputs[0]
        shapes = probe.shapes(source)
        if shapes is None:
            return None
        if all(
            math.prod(s) * expert_count == math.prod(w) and s[-1] == w[-1] for s, w in zip(shapes, whole, strict=True)
        ):
            subgraph = Subgraph.collect(graph, probe.step_values[0], name, {source}, _MAX_STEPS)
            if subgraph is None:
                return None
            x = mx.random.normal(shapes[0], key=mx.random.key(0)).astype(probe.step_values[0][source].dtype)
            copies = subgraph.evaluate({source: x})
            wanted = mx.broadcast_to(x.reshape(1, -1, x.shape[-1]), whole[0])
            return source if copies is not None and mx.array_equal(copies, wanted) else None
    return None
