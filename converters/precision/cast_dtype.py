"""A program in another float type: weights, cache and activations follow; what needs float32 keeps it.

To a half type, four things stay in float32. What depends on positions, masks and constants alone (the angles of a
rotation, the slopes of ALiBi) is computed there, and what comes of it is cast where it meets an activation. Where the
exporter cast a half activation to float32, the values stay in float32 until the exporter casts back, a weight scales
them or a product takes them. Sums, powers and exponentials that no rewrite has put into one node with its own float32
inside (a norm, a softmax) are such islands too. And the scales of 8-bit and 4-bit weights, which bfloat16 would move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.program import Node, Program, Value, WeightInfo
from mlx_transmuter.program.signature import DecoderSignature

SOURCE_FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")
HALF_DTYPES = ("float16", "bfloat16")
LAYER_OPS = ("mlx.linear", "mlx.embedding", "mlx.as_linear", "mlx.switch_linear")
# What overflows or loses digits in a half type where it is a node of its own.
FLOAT32_ISLAND_OPS = (
    *("Softmax", "LogSoftmax", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "CumSum", "ReduceMean", "ReduceSum"),
    *("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceProd"),
)
# Products take half types whatever they are of; joined values have the type of those that are half.
HALF_PRODUCT_OPS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "com.microsoft.FusedMatMul", "Concat")
# What reads rows of a weight: a learned table, whose rows are activations.
TABLE_READ_OPS = ("Gather", "com.microsoft.EmbedLayerNormalization")
# What is small, whatever it is computed from, and what leaves it so.
UNIT_BOUNDED_OPS = ("Cos", "Sin", "Tanh", "Sigmoid")

# Of a float value: computed without activations, in float32; in float32; in the half type.
ACTIVATION_FREE, FLOAT32, HALF = "kept", "single", "half"


def cast_program(program: Program, dtype: str, path: Path) -> Program:
    """The program with its floats in `dtype`: float16, bfloat16, or float32 for one in a half type.

    Raises ConvertError for a program with branches, whose values have types of their own, or that cannot be walked.
    """
    if any(True for node in program.nodes for _ in node.subprograms()):
        raise ConvertError(path, f"branches, for {dtype}", "a graph without If, Loop or Scan", "convert it as it is")
    if dtype == "float32":
        return _cast_to_float32(program)
    seen = ShapeProbe.run(program)
    if seen is None:
        raise ConvertError(path, f"a graph of which the types aren't known, for {dtype}", "one that can be walked")
    return _HalfPrecisionCast(program, dtype, seen, path).build_program()


def has_dtype(program: Program, dtype: str) -> bool:
    """Whether the cache, the logits and the floats of the layers are in `dtype` already."""
    values = [value.dtype for value in (*program.inputs, *program.outputs)]
    owned = [w.dtype for name, w in program.weights.items() if name.rpartition(".")[0] in program.layers]
    return {one for one in (*values, *owned) if one in SOURCE_FLOAT_DTYPES} <= {dtype}


def cast_tensor(source: LazyTensor, dtype: str, name: str, path: Path, clip: bool = False) -> LazyTensor:
    """The tensor in another float type, read and rounded when it is asked for. Raises ConvertError, then, for one with
    numbers beyond the type's; bounded: these become the type's largest instead, as in a mask.
    """

    def read() -> np.ndarray:
        floats, kind = source.to_device(), ops.device_dtype(dtype)
        if clip:
            floats = mx.where(mx.isfinite(floats), mx.clip(floats, mx.finfo(kind).min, mx.finfo(kind).max), floats)
        made = floats.astype(kind)
        if not mx.array_equal(mx.isfinite(floats), mx.isfinite(made)):
            raise ConvertError(path, f"numbers in {name} that {dtype} doesn't hold", "smaller ones", "use bfloat16")
        if dtype == "bfloat16":
            return np.array(made.view(mx.uint16)).view(np.dtype("bfloat16"))
        return np.array(made)

    return LazyTensor(dtype, source.shape, read)


def _cast_to_float32(program: Program) -> Program:
    """The program with every half type as float32."""
    arrays = {
        name: cast_tensor(one, "float32", name, Path()) if one.dtype in HALF_DTYPES else one
        for name, one in program.tensors.items()
    }

    def value(one: Value) -> Value:
        return replace(one, dtype="float32") if one.dtype in HALF_DTYPES else one

    def node(one: Node) -> Node:
        halved = is_op_type(one, "Cast") and ops.ELEMENT_TYPE_NAMES.get(one.attrs["to"]) in HALF_DTYPES
        return replace(one, attrs={**one.attrs, "to": ops.ELEMENT_TYPE_CODES["float32"]}) if halved else one

    return replace(
        program,
        inputs=tuple(map(value, program.inputs)),
        outputs=tuple(map(value, program.outputs)),
        nodes=list(map(node, program.nodes)),
        tensors=arrays,
        weights={name: WeightInfo(one.dtype, one.shape) for name, one in arrays.items()},
    )


@dataclass
class _HalfPrecisionCast:
    """One conversion to a half type: the state of each float value, and the nodes made so far."""

    source: Program
    dtype: str
    probe: ShapeProbe
    path: Path
    states: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    cast_values: dict[tuple[str, str], str] = field(default_factory=dict)
    range_bounded: set[str] = field(default_factory=set)  # kept values within the half type's numbers

    def build_program(self) -> Program:
        source = self.source
        self.constants = dict(source.constants)
        owned = {name for name in source.tensors if name.rpartition(".")[0] in source.layers}
        loose = {name for name, one in source.tensors.items() if one.dtype in SOURCE_FLOAT_DTYPES and name not in owned}
        self.states = {value.name: HALF for value in source.inputs if value.dtype in SOURCE_FLOAT_DTYPES}
        for name, array in source.constants.items():
            if array.dtype.kind == "f":
                self.states[name] = ACTIVATION_FREE
                self.range_bounded |= {name} if np.abs(array).max(initial=0) <= 1 else set()
        wants = [
            (one, self.record_states(one, loose)) for node in source.nodes for one in self.split_residual_sum(node)
        ]
        single = {name for node, want in wants if want != HALF for name in node.inputs}
        halved = loose - single
        self.states |= {name: HALF if name in halved else ACTIVATION_FREE for name in loose}
        signature = DecoderSignature.from_program(source)
        presents = {one.present for one in (*signature.cache_pairs, *signature.state_pairs)}
        for node, want in wants:
            self.append_node(node, want, presents)
        arrays = {
            name: cast_tensor(one, self.dtype, name, self.path, name in halved)
            if name in halved or self.takes_dtype(name, one, owned)
            else one
            for name, one in source.tensors.items()
        }
        return replace(
            source,
            inputs=tuple(self.cast_value(one) for one in source.inputs),
            outputs=tuple(self.cast_value(one) for one in source.outputs),
            nodes=self.nodes,
            constants=self.constants,
            tensors=arrays,
            weights={name: WeightInfo(one.dtype, one.shape) for name, one in arrays.items()},
        )

    def takes_dtype(self, name: str, tensor: LazyTensor, owned: set[str]) -> bool:
        """Whether an array of a layer takes the type: all floats but scales that bfloat16 has too few digits for."""
        scales = name.rpartition(".")[2] in ("scales", "biases")
        return name in owned and tensor.dtype in SOURCE_FLOAT_DTYPES and not (scales and self.dtype == "bfloat16")

    def cast_value(self, one: Value) -> Value:
        state = self.states.get(one.name)
        return replace(one, dtype=self.dtype if state == HALF else "float32") if state else one

    def is_float(self, name: str) -> bool:
        found = self.probe.step_values[0].get(name)
        if isinstance(found, np.ndarray):
            return found.dtype.kind == "f"
        return isinstance(found, mx.array) and mx.issubdtype(found.dtype, mx.floating)

    def split_residual_sum(self, node: Node) -> list[Node]:
        """The node; a product and its sum apart, where what it is added to is in float32 and the sum is to be, too."""
        to = node.inputs[2] if node.op == "mlx.linear" and len(node.inputs) > 2 else ""
        if self.states.get(to) != FLOAT32:
            return [node]
        product = f"{node.outputs[0]}.product"
        self.states[product] = HALF
        return [
            replace(node, inputs=node.inputs[:2], outputs=(product,)),
            Node("Add-7", (to, product), node.outputs, {}, node.name),
        ]

    def record_states(self, node: Node, loose: set[str]) -> str | None:
        """The state that the node's float inputs must have, with that of its outputs noted; None for no floats."""
        given = [self.states[name] for name in node.inputs if name in self.states]
        weights = [name for name in node.inputs if name in loose]
        floats = [name for name in node.outputs if name and self.is_float(name)]
        want, out = self.node_states(node, given, weights)
        self.states |= dict.fromkeys(floats, out)
        return want if given or weights else None

    def node_states(self, node: Node, input_states: list[str], weights: list[str]) -> tuple[str, str]:
        """What the node takes and what it gives."""
        active = set(input_states) - {ACTIVATION_FREE}
        if is_op_type(node, "Cast"):
            return self.cast_node_states(node, input_states)
        if node.op in LAYER_OPS or (node.op.startswith("mlx.") and active):
            return HALF, HALF
        if not active:
            table = weights and is_op_type(node, *TABLE_READ_OPS)
            return (HALF, HALF) if table else (ACTIVATION_FREE, ACTIVATION_FREE)
        if is_op_type(node, *FLOAT32_ISLAND_OPS):
            return FLOAT32, FLOAT32
        product = is_op_type(node, *HALF_PRODUCT_OPS) or "Attention" in node.op
        scaled = any(np.prod(self.source.weights[name].shape) > 1 for name in weights)
        return (HALF, HALF) if product or scaled or active == {HALF} else (FLOAT32, FLOAT32)

    def cast_node_states(self, node: Node, input_states: list[str]) -> tuple[str, str]:
        """An exporter's cast of an activation: to a half type, or to float32 where it isn't there already."""
        to = ops.ELEMENT_TYPE_NAMES.get(node.attrs["to"])
        if to in HALF_DTYPES:
            return (input_states or [ACTIVATION_FREE])[0], HALF
        if not input_states or input_states[0] == ACTIVATION_FREE or to not in SOURCE_FLOAT_DTYPES:
            return ACTIVATION_FREE if not input_states else input_states[0], ACTIVATION_FREE
        found = self.probe.dtype(node.inputs[0])
        return (input_states[0], FLOAT32) if found in HALF_DTYPES else (input_states[0], input_states[0])

    def append_node(self, node: Node, input_state: str | None, presents: set[str]) -> None:
        """The node, its float inputs cast to what it wants, and its outputs to what a cache or the next node wants."""
        inputs = tuple(
            self.value_in_state(name, input_state) if name in self.states and input_state else name
            for name in node.inputs
        )
        node = replace(node, inputs=inputs)
        if is_op_type(node, "Cast") and (state := self.states.get(node.outputs[0])):
            node = replace(node, attrs={**node.attrs, "to": self.onnx_type_code(state)})
        narrow = [name for name in node.outputs if name in presents and self.states.get(name) != HALF]
        if node.op in LAYER_OPS and "bits" in self.source.layers[node.inputs[1]] and self.dtype == "bfloat16":
            narrow = list(node.outputs)  # its scales are float32, and so is what it gives
        wide = {name: f"{name}.wide" for name in narrow if name in self.states}
        floats = [name for name in node.inputs if name in self.states]
        if is_op_type(node, *UNIT_BOUNDED_OPS) or (floats and all(name in self.range_bounded for name in floats)):
            self.range_bounded.update(node.outputs)
        self.nodes.append(replace(node, outputs=tuple(wide.get(name, name) for name in node.outputs)))
        for name, other in wide.items():
            self.nodes.append(Node("Cast-9", (other,), (name,), {"to": self.onnx_type_code(HALF)}))
            self.states[name] = HALF

    def value_in_state(self, name: str, target_state: str) -> str:
        """The name of the value in the state that is wanted, with the nodes that make it so where it isn't."""
        state = self.states[name]
        if (state == HALF) == (target_state == HALF):
            return name
        to = HALF if target_state == HALF else FLOAT32
        if (name, to) not in self.cast_values:
            made = f"{name}.{self.dtype if to == HALF else 'float32'}"
            source = self.clip_value(name) if state == ACTIVATION_FREE else name
            self.nodes.append(Node("Cast-9", (source,), (made,), {"to": self.onnx_type_code(to)}))
            self.cast_values[name, to] = made
        return self.cast_values[name, to]

    def clip_value(self, name: str) -> str:
        """The value within the half type's numbers: a mask's lowest number would become -inf, and NaN when two meet."""
        info = mx.finfo(ops.device_dtype(self.dtype))
        if name in self.range_bounded:
            return name
        for end, limit in (("lowest", info.min), ("highest", info.max)):
            self.constants.setdefault(f"{self.dtype}.{end}", np.array(limit, np.float32))
        self.nodes.append(
            Node("Clip-11", (name, f"{self.dtype}.lowest", f"{self.dtype}.highest"), (f"{name}.bounded",))
        )
        return f"{name}.bounded"

    def onnx_type_code(self, state: str) -> int:
        return ops.ELEMENT_TYPE_CODES[self.dtype if state == HALF else "float32"]
