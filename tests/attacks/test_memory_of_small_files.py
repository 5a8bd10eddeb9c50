"""Small files whose nodes ask for much memory: what is known while a graph is traced, and what is folded, has a budget."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.graph import constant_budget
from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.simplify.fold_constants import fold_constants
from mlx_transmuter.converters.passes.simplify.fold_static_shapes import fold_static_shapes
from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Program
from mlx_transmuter.runtime import program_walk
from mlx_transmuter.runtime.module import ProgramModule

NODES = 3000
# A node that gives a value of `size` elements from the constants `size`, `shape` ([size]) and `one` ([1]), by operator.
GROWING = {
    "ConstantOfShape": lambda name: helper.make_node("ConstantOfShape", ["shape"], [name], value=numpy_helper.from_array(np.array([1], np.int64))),
    "Expand": lambda name: helper.make_node("Expand", ["one", "shape"], [name]),
    "Tile": lambda name: helper.make_node("Tile", ["one", "shape"], [name]),
    "Range": lambda name: helper.make_node("Range", ["zero", "size", "step"], [name]),
    "Pad": lambda name: helper.make_node("Pad", ["one", "pads"], [name]),
}  # fmt: skip


def decoder(op: str, size: int) -> Program:
    """A decoder's inputs and outputs, and many nodes that give `size` elements each; the logits read all of them."""
    arrays = {
        "shape": [size], "one": [1], "size": size, "zero": 0, "step": 1, "pads": [0, size - 1], "axes": [0],
    }  # fmt: skip
    initializers = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in arrays.items()]
    nodes = [GROWING[op](f"grown{i}") for i in range(NODES)]
    nodes += [helper.make_node("Sum", [f"f{i}" for i in range(NODES)], ["all"])]
    nodes[-1:-1] = [helper.make_node("Cast", [f"grown{i}"], [f"f{i}"], to=TensorProto.FLOAT) for i in range(NODES)]
    nodes += [
        helper.make_node("ReduceSum", ["all", "axes"], ["total"], keepdims=1),
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Add", ["rows", "total"], ["logits"]),
    ]
    initializers.append(numpy_helper.from_array(np.ones((8, 8), np.float32), "table"))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 8])
    graph = helper.make_graph(nodes, "small", [ids], [logits], initializers)
    return read_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def peak_of(function) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("op", GROWING)
def test_values_on_the_host_have_a_budget(op, monkeypatch):
    monkeypatch.setattr(program_walk, "MAX_HOST_BYTES", 2**22)
    program = decoder(op, 2**13)
    assert peak_of(lambda: ShapeProbe.run(program)) < NODES * 2**10 * 4 + 2**24  # 200 MB without a budget
    module = ProgramModule(program, {name: tensor.to_device() for name, tensor in program.tensors.items()})
    with pytest.raises(OperatorError, match="bytes of values that are known while the graph is traced"):
        module(input_ids=np.array([[1, 2]], np.int32))


@pytest.mark.parametrize("op", ["ConstantOfShape", "Range"])
@pytest.mark.parametrize("rewrite", [fold_constants, fold_static_shapes])
def test_folded_constants_have_a_budget(op, rewrite, monkeypatch):
    monkeypatch.setattr(constant_budget, "MAX_ADDED_BYTES", 2**20)
    program = decoder(op, 2**9)
    outcomes = [*rewrite(GraphView(program))]
    folded = [array for outcome in outcomes for array in getattr(outcome, "constants", {}).values()]
    assert 2**19 < sum(array.nbytes for array in folded) <= 2**20 < NODES * 8 * 2**9
