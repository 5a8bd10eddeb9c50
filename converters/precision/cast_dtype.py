"""A program in another float type: weights, cache and activations follow; what needs float32 keeps it.

To a half type, what has no activation in it and what would overflow or lose digits stays in float32 (see float_states),
and so do the scales of 8-bit and 4-bit weights, which bfloat16 would move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.graph_view import is_op_type
from mlx_transmuter.converters.graph.operator_sets import LAYER_OPS
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.precision.float_states import (
    SOURCE_FLOAT_DTYPES,
    FloatPlan,
    FloatState,
    plan_float_states,
)
from mlx_transmuter.precision_options import HALF_DTYPES
from mlx_transmuter.program import Node, Program, Value, WeightInfo
from mlx_transmuter.program.layer_arrays import array_owner
from mlx_transmuter.program.signature import DecoderSignature

# What is small, whatever it is computed from.
UNIT_BOUNDED_OPS = ("Cos", "Sin", "Tanh", "Sigmoid")


def cast_program(program: Program, dtype: str, path: Path) -> Program:
    """Returns the program with its floats in `dtype`: float16, bfloat16, or float32 for one in a half type.

    Raises ConvertError for a program with branches, whose values have types of their own, or that cannot be probed.
    """
    if any(True for node in program.nodes for _ in node.subprograms()):
        raise ConvertError(path, f"branches, for {dtype}", "a graph without If, Loop or Scan", "convert it as it is")
    if dtype == "float32":
        return _cast_to_float32(program)
    probe = ShapeProbe.run(program)
    if probe is None:
        raise ConvertError(
            path,
            f"a graph whose values have unknown types, for {dtype}",
            "a decoder whose shapes do not depend on values",
            "convert it as it is",
        )
    return _HalfPrecisionCast(program, dtype, plan_float_states(program, probe), path).build_program()


def has_dtype(program: Program, dtype: str) -> bool:
    """Returns whether the cache, the logits and the floats of the layers are in `dtype` already."""
    values = [value.dtype for value in (*program.inputs, *program.outputs)]
    owned = [weight.dtype for name, weight in program.weights.items() if array_owner(name, program.layers)]
    return {name for name in (*values, *owned) if name in SOURCE_FLOAT_DTYPES} <= {dtype}


def cast_tensor(source: LazyTensor, dtype: str, name: str, path: Path, clip: bool = False) -> LazyTensor:
    """Returns the tensor in another float type, read and rounded row by row when it is asked for.

    Reading it raises ConvertError for numbers beyond the type's range. clip: these become the type's largest instead,
    as in a mask.
    """

    def cast_rows(rows: np.ndarray) -> np.ndarray:
        floats, device_dtype = ops.to_device(rows), ops.device_dtype(dtype)
        if clip:
            info = mx.finfo(device_dtype)
            floats = mx.where(mx.isfinite(floats), mx.clip(floats, info.min, info.max), floats)
        rounded = floats.astype(device_dtype)
        if not mx.array_equal(mx.isfinite(floats), mx.isfinite(rounded)):
            raise ConvertError(path, f"numbers in {name} that {dtype} cannot represent", "smaller ones", "use bfloat16")
        if dtype == "bfloat16":
            return np.array(rounded.view(mx.uint16)).view(np.dtype("bfloat16"))
        return np.array(rounded)

    return source.map_rows(dtype, cast_rows)


def _with_tensors(program: Program, tensors: dict[str, LazyTensor], **fields) -> Program:
    weights = {name: WeightInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return replace(program, tensors=tensors, weights=weights, **fields)


def _cast_to_float32(program: Program) -> Program:
    """Returns the program with every half type as float32."""
    tensors = {
        name: cast_tensor(tensor, "float32", name, Path()) if tensor.dtype in HALF_DTYPES else tensor
        for name, tensor in program.tensors.items()
    }

    def cast_value(value: Value) -> Value:
        return replace(value, dtype="float32") if value.dtype in HALF_DTYPES else value

    def cast_node(node: Node) -> Node:
        if is_op_type(node, "Cast") and ops.ELEMENT_TYPE_NAMES.get(node.attrs["to"]) in HALF_DTYPES:
            return replace(node, attrs={**node.attrs, "to": ops.ELEMENT_TYPE_CODES["float32"]})
        return node

    return _with_tensors(
        program,
        tensors,
        inputs=tuple(map(cast_value, program.inputs)),
        outputs=tuple(map(cast_value, program.outputs)),
        nodes=list(map(cast_node, program.nodes)),
    )


@dataclass
class _HalfPrecisionCast:
    """One cast to a half type: the nodes and constants so far.

    cast_values: (value, dtype) -> the name of the value cast to it.
    unit_bounded: values without activations between -1 and 1, or copies of these, which every half type holds.
    """

    source: Program
    dtype: str
    plan: FloatPlan
    path: Path
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    cast_values: dict[tuple[str, str], str] = field(default_factory=dict)
    unit_bounded: set[str] = field(default_factory=set)

    @property
    def states(self) -> dict[str, FloatState]:
        return self.plan.states

    def build_program(self) -> Program:
        source = self.source
        self.constants = dict(source.constants)
        self.unit_bounded = {
            name
            for name, array in source.constants.items()
            if array.dtype.kind == "f" and np.abs(array).max(initial=0) <= 1
        }
        signature = DecoderSignature.from_program(source)
        presents = {pair.present for pair in (*signature.cache_pairs, *signature.state_pairs)}
        for node, input_state in self.plan.nodes:
            self._append_node(node, input_state, presents)
        return _with_tensors(
            source,
            {name: self._cast_weight(name, tensor) for name, tensor in source.tensors.items()},
            inputs=tuple(map(self._cast_value, source.inputs)),
            outputs=tuple(map(self._cast_value, source.outputs)),
            nodes=self.nodes,
            constants=self.constants,
        )

    def _cast_weight(self, name: str, tensor: LazyTensor) -> LazyTensor:
        """Returns the weight in its type: a layer's arrays in the half type, but for scales that bfloat16 has too few
        digits for.
        """
        if name in self.plan.half_weights:
            return cast_tensor(tensor, self.dtype, name, self.path, clip=True)
        owner = array_owner(name, self.source.layers)
        if owner is None or tensor.dtype not in SOURCE_FLOAT_DTYPES:
            return tensor
        keeps_digits = owner[1] in ("scales", "biases") and self.dtype == "bfloat16"
        return tensor if keeps_digits else cast_tensor(tensor, self.dtype, name, self.path)

    def _cast_value(self, value: Value) -> Value:
        state = self.states.get(value.name)
        return replace(value, dtype=self._dtype_of(state)) if state else value

    def _dtype_of(self, state: FloatState) -> str:
        return self.dtype if state is FloatState.HALF else "float32"

    def _cast_node(self, source: str, result: str, state: FloatState) -> Node:
        return Node("Cast-9", (source,), (result,), {"to": ops.ELEMENT_TYPE_CODES[self._dtype_of(state)]})

    def _append_node(self, node: Node, input_state: FloatState | None, presents: set[str]) -> None:
        """Appends the node with its float inputs cast to the state that it takes, and its float32 outputs cast to the
        half type where a cache or a layer's readers take that.
        """
        inputs = tuple(
            self._value_in_state(name, input_state) if name in self.states and input_state else name
            for name in node.inputs
        )
        node = replace(node, inputs=inputs)
        if is_op_type(node, "Cast") and (state := self.states.get(node.outputs[0])):
            node = replace(node, attrs={**node.attrs, "to": ops.ELEMENT_TYPE_CODES[self._dtype_of(state)]})
        self._note_bounds(node)
        narrowed = {name: f"{name}.wide" for name in self._outputs_to_narrow(node, presents)}
        self.nodes.append(replace(node, outputs=tuple(narrowed.get(name, name) for name in node.outputs)))
        for name, wide in narrowed.items():
            self.nodes.append(self._cast_node(wide, name, FloatState.HALF))
            self.states[name] = FloatState.HALF

    def _outputs_to_narrow(self, node: Node, presents: set[str]) -> list[str]:
        is_quantized = node.op in LAYER_OPS and "bits" in self.source.layers[node.inputs[1]]
        if is_quantized and self.dtype == "bfloat16":  # its scales are float32, and so is what it gives
            return [name for name in node.outputs if name in self.states]
        presents_of_node = (name for name in node.outputs if name in presents and name in self.states)
        return [name for name in presents_of_node if self.states[name] is not FloatState.HALF]

    def _note_bounds(self, node: Node) -> None:
        floats = [name for name in node.inputs if name in self.states]
        keeps_bounds = floats and self.unit_bounded.issuperset(floats)
        if keeps_bounds or is_op_type(node, *UNIT_BOUNDED_OPS):
            self.unit_bounded.update(node.outputs)

    def _value_in_state(self, name: str, target: FloatState) -> str:
        """Returns the name of the value in the type of the state, with a cast added where it is in another type."""
        state, dtype = self.states[name], self._dtype_of(target)
        if self._dtype_of(state) == dtype:
            return name
        if (name, dtype) not in self.cast_values:
            source = self._clip_value(name) if state is FloatState.ACTIVATION_FREE else name
            result = f"{name}.{dtype}"
            self.nodes.append(self._cast_node(source, result, target))
            self.cast_values[name, dtype] = result
        return self.cast_values[name, dtype]

    def _clip_value(self, name: str) -> str:
        """Returns the name of the value within the half type's numbers: a mask's lowest number would become -inf, and
        NaN where two meet.
        """
        if name in self.unit_bounded:
            return name
        info = mx.finfo(ops.device_dtype(self.dtype))
        for end, limit in (("lowest", info.min), ("highest", info.max)):
            self.constants.setdefault(f"{self.dtype}.{end}", np.array(limit, np.float32))
        limits = (f"{self.dtype}.lowest", f"{self.dtype}.highest")
        self.nodes.append(Node("Clip-11", (name, *limits), (f"{name}.bounded",)))
        return f"{name}.bounded"
