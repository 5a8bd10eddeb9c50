"""The float states of a program's values: which of them take a half type, which need float32, and which hold no
activation.

What depends on positions, masks and constants alone (the angles of a rotation, the slopes of ALiBi) holds no
activation: it is computed in float32, and what comes of it is cast where it meets an activation. Where the exporter
cast a half activation to float32, the values stay in float32 until the exporter casts back, a weight scales them or a
product takes them. Sums, powers and exponentials are in float32 too, unless a rewrite has put them into a node that
computes in float32 inside (a norm, a softmax).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.operator_sets import LAYER_OPS
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.precision_options import HALF_DTYPES
from mlx_transmuter.program import Node, Program
from mlx_transmuter.program.layer_arrays import array_owner

SOURCE_FLOAT_DTYPES = (*HALF_DTYPES, "float32", "float64")
# What overflows or loses digits in a half type where it is a node of its own.
FLOAT32_ONLY_OPS = (
    *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "CumSum", "ReduceMean", "ReduceSum"),
    *("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd"),
)
# Products take half types whatever they are of; joined values have the type of those that are half.
HALF_PRODUCT_OPS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "com.microsoft.FusedMatMul", "Concat")
# What reads rows of a weight: a learned table, whose rows are activations.
TABLE_READ_OPS = ("Gather", "com.microsoft.EmbedLayerNormalization")


class FloatState(Enum):
    """How a float value is computed in a program that is cast to a half type."""

    ACTIVATION_FREE = "without activations, in float32"
    FLOAT32 = "in float32"
    HALF = "in the half type"


@dataclass(frozen=True)
class FloatPlan:
    """What a cast to a half type does.

    states: of each float value. nodes: the program's nodes in their order, each with the state in which it takes its
    float inputs, or None where it has none; a product is apart from a sum in float32. half_weights: weights of no layer
    that are stored in the half type.
    """

    states: dict[str, FloatState]
    nodes: list[tuple[Node, FloatState | None]]
    half_weights: set[str]


def plan_float_states(program: Program, probe: ShapeProbe) -> FloatPlan:
    """Returns the float states of a program's values by what each node takes and gives."""
    loose_weights = {
        name
        for name, tensor in program.tensors.items()
        if tensor.dtype in SOURCE_FLOAT_DTYPES and array_owner(name, program.layers) is None
    }
    states = {value.name: FloatState.HALF for value in program.inputs if value.dtype in SOURCE_FLOAT_DTYPES}
    constants = (name for name, array in program.constants.items() if array.dtype.kind == "f")
    states |= dict.fromkeys(constants, FloatState.ACTIVATION_FREE)
    inference = _StateInference(program, probe, loose_weights, states)
    nodes = [
        (node, inference.record(node)) for original in program.nodes for node in inference.split_residual_sum(original)
    ]
    in_float32 = {name for node, state in nodes if state is not FloatState.HALF for name in node.inputs}
    half_weights = loose_weights - in_float32
    for name in loose_weights:
        states[name] = FloatState.HALF if name in half_weights else FloatState.ACTIVATION_FREE
    return FloatPlan(states, nodes, half_weights)


@dataclass
class _StateInference:
    """The states of the values so far, from the first node to the last."""

    program: Program
    probe: ShapeProbe
    loose_weights: set[str]
    states: dict[str, FloatState] = field(default_factory=dict)

    def split_residual_sum(self, node: Node) -> list[Node]:
        """Returns the node; or its product and its sum apart, where what it is added to is in float32, as the sum then
        is.
        """
        residual = node.inputs[2] if node.op == "mlx.linear" and len(node.inputs) > 2 else ""
        if self.states.get(residual) is not FloatState.FLOAT32:
            return [node]
        product = f"{node.outputs[0]}.product"
        self.states[product] = FloatState.HALF
        return [
            replace(node, inputs=node.inputs[:2], outputs=(product,)),
            Node("Add-7", (residual, product), node.outputs, {}, node.name),
        ]

    def record(self, node: Node) -> FloatState | None:
        """Notes the state of the node's float outputs. Returns that of its float inputs, None where it has none."""
        input_states = [self.states[name] for name in node.inputs if name in self.states]
        weights = [name for name in node.inputs if name in self.loose_weights]
        input_state, output_state = self._node_states(node, input_states, weights)
        self.states |= {name: output_state for name in node.outputs if name and self._is_float(name)}
        return input_state if input_states or weights else None

    def _is_float(self, name: str) -> bool:
        value = self.probe.step_values[0].get(name)
        if isinstance(value, np.ndarray):
            return value.dtype.kind == "f"
        return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)

    def _node_states(
        self, node: Node, input_states: list[FloatState], weights: list[str]
    ) -> tuple[FloatState, FloatState]:
        """Returns the state in which the node takes its inputs, and that of its outputs."""
        if is_op_type(node, "Cast"):
            return self._cast_states(node, input_states[0] if input_states else None)
        activations = set(input_states) - {FloatState.ACTIVATION_FREE}
        if node.op in LAYER_OPS or (node.op.startswith("mlx.") and activations):
            return FloatState.HALF, FloatState.HALF
        if not activations:
            reads_table = weights and is_op_type(node, *TABLE_READ_OPS)
            state = FloatState.HALF if reads_table else FloatState.ACTIVATION_FREE
            return state, state
        if is_op_type(node, *FLOAT32_ONLY_OPS):
            return FloatState.FLOAT32, FloatState.FLOAT32
        is_product = is_op_type(node, *HALF_PRODUCT_OPS) or "Attention" in node.op
        is_scaled = any(np.prod(self.program.weights[name].shape) > 1 for name in weights)
        is_half = is_product or is_scaled or activations == {FloatState.HALF}
        state = FloatState.HALF if is_half else FloatState.FLOAT32
        return state, state

    def _cast_states(self, node: Node, input_state: FloatState | None) -> tuple[FloatState, FloatState]:
        """Returns the states of an exporter's cast: to a half type, or to float32 where the value isn't there yet."""
        dtype = ops.ELEMENT_TYPE_NAMES.get(node.attrs["to"])
        state = input_state or FloatState.ACTIVATION_FREE
        if dtype in HALF_DTYPES:
            return state, FloatState.HALF
        if state is FloatState.ACTIVATION_FREE or dtype not in SOURCE_FLOAT_DTYPES:
            return state, FloatState.ACTIVATION_FREE
        is_widening = self.probe.dtype(node.inputs[0]) in HALF_DTYPES
        return state, FloatState.FLOAT32 if is_widening else state
