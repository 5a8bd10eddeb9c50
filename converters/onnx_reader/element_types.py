"""Element types of the values of an ONNX graph, for operators whose result has the type of one of their inputs.

MLX holds several of ONNX's types in one, so such a type is known only while the file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from mlx_transmuter.converters.onnx_reader.onnx_graphs import walk_graphs, walk_nodes
from mlx_transmuter.converters.onnx_reader.opsets import operator_name
from mlx_transmuter.converters.onnx_reader.tensor_protos import SUB_BYTE_INTEGERS
from mlx_transmuter.ops import ELEMENT_TYPE_NAMES

# Operator -> the number of the input whose type its result has.
_RESULT_TYPE_INPUTS = {"CastLike": 1, "QuantizeLinear": 2}


def depends_on_element_types(nodes: Iterable[NodeProto]) -> bool:
    """Whether a node, or one of a graph inside one, has a result of the type of an input."""
    return any(operator_name(node) in _RESULT_TYPE_INPUTS for node in walk_nodes(nodes))


def infer_element_types(model: ModelProto, nodes: Iterable[NodeProto]) -> dict[str, int]:
    """Returns the code of the ONNX type of each value by its name, as far as ONNX's shape inference tells it.

    nodes: those of the outermost graph, each after those that it reads. A name that values of two types have, as names
    in branches may, is left out. The data of weights is not looked at.
    """
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    graph.name = "types"
    graph.node.extend(nodes)
    initializers = {tensor.name for tensor in model.graph.initializer}
    graph.input.extend(value for value in model.graph.input if value.name not in initializers)
    for tensor in model.graph.initializer:
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    graph.value_info.extend(model.graph.value_info)
    graph.output.extend(ValueInfoProto(name=value.name) for value in model.graph.output)
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
    except Exception:  # it raises errors of many types; the types that the file declares hold all the same
        inferred = light
    codes: dict[str, set[int]] = {}
    for graph in walk_graphs(inferred.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            if code := value.type.tensor_type.elem_type:
                codes.setdefault(value.name, set()).add(code)
    return {name: types.pop() for name, types in codes.items() if len(types) == 1}


def resolve_result_type(
    node: NodeProto, attrs: dict[str, Any], element_types: Mapping[str, int]
) -> tuple[NodeProto, dict[str, Any]]:
    """Returns a node and its attributes that name the type of its result, where it takes it from an input.

    CastLike becomes Cast; QuantizeLinear gets the attribute `output_dtype` for an integer below 8 bits, whose zero
    point lies in a byte and no longer tells its type.
    """
    number = _RESULT_TYPE_INPUTS.get(operator_name(node))
    code = element_types.get(node.input[number], 0) if number is not None and number < len(node.input) else 0
    if not code:
        return node, attrs
    if node.op_type == "CastLike":
        cast_attrs = {name: value for name, value in attrs.items() if name in ("saturate", "round_mode")}
        cast = NodeProto(op_type="Cast", name=node.name, input=node.input[:1], output=node.output)
        return cast, {**cast_attrs, "to": code}
    if ELEMENT_TYPE_NAMES.get(code) in SUB_BYTE_INTEGERS and not attrs.get("output_dtype"):
        return node, {**attrs, "output_dtype": code}
    return node, attrs
