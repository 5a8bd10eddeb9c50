"""Element types: operators whose result has the type of an input get it from the file, not from the value in a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy
from onnx import TensorProto, helper, numpy_helper
from small import F32, I64, X, branch, model, run

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.pipeline import convert

LIKE = {
    "an input": (lambda: ([], [("like", TensorProto.FLOAT16, [1])], []), "like"),
    "a weight": (lambda: ([], [], [numpy_helper.from_array(np.zeros(2, np.float16), "like")]), "like"),
    "a value": (lambda: ([helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16), helper.make_node("Neg", ["h"], ["like"])], [], []), "like"),
}  # fmt: skip


@pytest.mark.parametrize("where", LIKE)
def test_a_cast_to_the_type_of_a_value_is_a_cast_to_that_type(where):
    """Only the type of the value matters: the program does not read it."""
    (nodes, inputs, weights), like = LIKE[where][0](), LIKE[where][1]
    proto = model(
        [*nodes, helper.make_node("CastLike", ["x", like], ["y"])],
        inputs=(("x", F32, [2, 3]), *inputs), initializers=weights,
    )  # fmt: skip
    program = read_onnx(proto)
    assert program.producers()["y"].op == "Cast-9"
    inputs = tuple(value for value in program.inputs if value.name != "like")
    found = run(replace(program.select_outputs(["y"]), inputs=inputs), x=X)["y"]
    assert found.dtype == np.float16
    assert found.tolist() == X.astype(np.float16).tolist()


def test_a_cast_to_a_type_that_differs_between_branches_stays():
    """Both branches compute "t", each of another type; CastLike inside takes that of its branch."""
    then = branch(
        [helper.make_node("Cast", ["x"], ["t"], to=I64), helper.make_node("CastLike", ["x", "t"], ["r"])], "r"
    )
    other = branch([helper.make_node("Neg", ["x"], ["t"]), helper.make_node("CastLike", ["t", "t"], ["r"])], "r")
    for taken in (True, False):
        node = helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)
        proto = model([node], initializers=[numpy_helper.from_array(np.array(taken), "flag")])
        found = run(read_onnx(proto), x=X)["y"]
        assert found.tolist() == (X.astype(np.int64) if taken else -X).tolist()


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "UINT2"])
def test_a_zero_point_below_8_bits_gives_the_output_type_of_a_quantization(kind):
    code, (low, high) = (
        getattr(TensorProto, kind),
        {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}[kind],
    )
    zero = helper.make_tensor("zero", code, [], [1])
    scale = numpy_helper.from_array(np.array(0.5, np.float32), "scale")
    program = read_onnx(
        model([helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])], initializers=[zero, scale], opset=25)
    )
    assert program.nodes[0].attrs["output_dtype"] == code
    assert run(program, x=X)["y"].tolist() == np.clip(np.round(X / 0.5) + 1, low, high).tolist()


@pytest.mark.parametrize("kind", ["FLOAT6E2M3", "FLOAT6E3M2"])
def test_floats_of_6_bits_are_refused_by_name(kind, tmp_path):
    proto = toy.decoder(21)
    code = getattr(TensorProto, kind)
    toy.replace(proto, "head.bias", helper.make_tensor("head.bias", code, [toy.VOCAB], np.zeros(toy.VOCAB, np.float32)))
    proto.graph.node.insert(0, helper.make_node("Cast", ["head.bias"], ["bias"], to=TensorProto.FLOAT))
    toy.node(proto, "logits").input[1] = "bias"
    with pytest.raises(ConvertError, match=kind.lower().replace("float6e", "float6_e")):
        convert(toy.write(tmp_path / "s", proto), "model.onnx", tmp_path / "out", progress=False)
