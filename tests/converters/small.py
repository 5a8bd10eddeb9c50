"""Graphs of a few nodes, and what they give once they are read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import onnx
from onnx import TensorProto, helper

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.module import ProgramModule

F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X = np.array([[1.0, -2.0, 3.0], [0.5, 4.0, -6.0]], np.float32)


def model(nodes, *, initializers=(), sparse=(), inputs=(("x", F32, [2, 3]),), outputs=("y",), functions=(), opset=18):
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    given = [helper.make_tensor_value_info(*value) for value in inputs]
    graph = helper.make_graph(nodes, "g", given, results, list(initializers), sparse_initializer=list(sparse))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10)


def run(program: Program, **inputs) -> dict[str, np.ndarray]:
    arrays = {name: ops.to_device(tensor.read()) for name, tensor in program.tensors.items()}
    found = ProgramModule(program, arrays)(**{name: mx.array(value) for name, value in inputs.items()})
    return {name: np.array(value) for name, value in found.items()}


def reference(proto, **inputs) -> dict[str, Any]:
    from onnx.reference import ReferenceEvaluator

    names = [value.name for value in proto.graph.output]
    return dict(zip(names, ReferenceEvaluator(proto).run(None, inputs), strict=True))


def agrees(proto, **inputs) -> Program:
    program = read_onnx(proto)
    found, wanted = run(program, **inputs), reference(proto, **inputs)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    return program


def branch(nodes, result, initializers=()):
    return helper.make_graph(nodes, "branch", [], [onnx.ValueInfoProto(name=result)], list(initializers))
