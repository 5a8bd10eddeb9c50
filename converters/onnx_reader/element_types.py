"""Element types: of what type the values of an ONNX graph are, where a node's meaning hangs on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

# Operators that take the type of their result from an input, and which one. MLX holds several of ONNX's types in one,
# so the type is only known while the file is read.
RESULT_TYPE_INPUT = {"CastLike": 1, "QuantizeLinear": 2}


def infer_element_types(model: ModelProto, nodes: Iterable[NodeProto]) -> dict[str, int]:
    """The ONNX element type of each value, by its name, as far as ONNX's inference tells it.

    nodes: those of the outermost graph, each after those that it reads. A name that stands for values of two types, as
    names of branches may, is left out. The weights themselves are not looked at.
    """
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    graph.name = "types"
    graph.node.extend(nodes)
    stored = {tensor.name for tensor in model.graph.initializer}
    graph.input.extend(value for value in model.graph.input if value.name not in stored)
    for tensor in model.graph.initializer:
        graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    graph.value_info.extend(model.graph.value_info)
    graph.output.extend(ValueInfoProto(name=value.name) for value in model.graph.output)
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
    except Exception:  # it raises what it likes; what the file itself says stands all the same
        inferred = light
    found: dict[str, set[int]] = {}
    for value in _walk_values(inferred.graph):
        if code := value.type.tensor_type.elem_type:
            found.setdefault(value.name, set()).add(code)
    return {name: codes.pop() for name, codes in found.items() if len(codes) == 1}


def _walk_values(graph: GraphProto) -> Iterator[ValueInfoProto]:
    yield from (*graph.input, *graph.value_info, *graph.output)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _walk_values(attribute.g)
