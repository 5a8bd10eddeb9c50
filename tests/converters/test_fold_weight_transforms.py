"""fold_weight_transforms: a weight that the graph transforms is transformed at conversion, with equal results."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from small import X, model, reference, run

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.simplify.fold_weight_transforms import fold_weight_transforms

W = np.arange(6, dtype=np.float16).reshape(6, 1) - 2.5


def axes(name, *values):
    return numpy_helper.from_array(np.array(values), name)


CHAINS = {
    "cast": ([helper.make_node("Cast", ["w"], ["a"], to=TensorProto.FLOAT), helper.make_node("Reshape", ["a", "s"], ["b"])], [axes("s", 2, 3)]),
    "reshape first": ([helper.make_node("Reshape", ["w", "s"], ["a"]), helper.make_node("Cast", ["a"], ["b"], to=TensorProto.FLOAT)], [axes("s", 2, -1)]),
    "a row": ([helper.make_node("Reshape", ["w", "s"], ["h"]), helper.make_node("Unsqueeze", ["h", "u"], ["a"]),
               helper.make_node("Transpose", ["a"], ["t"], perm=[0, 2, 1]), helper.make_node("Reshape", ["t", "z"], ["f"]),
               helper.make_node("Cast", ["f"], ["b"], to=TensorProto.FLOAT)],
              [axes("s", 3, 2), axes("u", -3), axes("z", 2, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
def test_transforms_of_a_weight_are_computed_at_conversion(chain, shared):
    nodes, constants = CHAINS[chain]
    last = [helper.make_node("Add", ["x", "b"], ["y"])]
    if shared:  # the weight as it is is read too, and the one between
        last += [helper.make_node("Neg", ["w"], ["z1"]), helper.make_node("Neg", [nodes[0].output[0]], ["z2"])]
    proto = model([*nodes, *last], initializers=[numpy_helper.from_array(W, "w"), *constants],
                  outputs=("y", "z1", "z2") if shared else ("y",))  # fmt: skip
    program = read_onnx(proto)
    after, record = apply_rewrite(program, fold_weight_transforms)
    after.validate()
    assert record.replaced_count == len(nodes)
    assert [node.op.partition("-")[0] for node in after.nodes] == ["Add", "Neg", "Neg"][: len(last)]
    found, wanted = run(after, x=X), reference(proto, x=X)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


STAY = {
    "a matrix's transpose": helper.make_node("Transpose", ["w"], ["b"]),
    "a cast to integers": helper.make_node("Cast", ["w"], ["b"], to=TensorProto.INT32),
    "a shape that only the run tells": helper.make_node("Reshape", ["w", "shape"], ["b"]),
    "a shape of another size": helper.make_node("Reshape", ["w", "five"], ["b"]),
    "axes that it has not": helper.make_node("Unsqueeze", ["w", "five"], ["b"]),
    "an order of too few axes": helper.make_node("Transpose", ["w"], ["b"], perm=[0]),
}


@pytest.mark.parametrize("what", STAY)
def test_other_transforms_stay(what):
    shape = [helper.make_node("Shape", ["x"], ["shape"])]
    proto = model([*shape, STAY[what], helper.make_node("Identity", ["b"], ["y"])],
                  initializers=[numpy_helper.from_array(W.reshape(2, 3), "w"), axes("five", 5)])  # fmt: skip
    assert list(fold_weight_transforms(GraphView(read_onnx(proto)))) == []


def test_integer_weights_that_are_cast_to_floats_stay():
    """As floats they would make the file four times as large."""
    node = helper.make_node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)
    weight = numpy_helper.from_array(np.arange(6, dtype=np.int8), "w")
    assert list(fold_weight_transforms(GraphView(read_onnx(model([node], initializers=[weight]))))) == []
