"""Data of tensors inside an ONNX file: it stays in the file, is read as protobuf reads it, and malformed files are refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx
import pytest
from conftest import FIXTURES
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader import inline_data
from mlx_transmuter.converters.onnx_reader.onnx_file import load_onnx_file
from mlx_transmuter.converters.onnx_reader.reader import read_onnx

LARGE = np.arange(2**20, dtype=np.float32).reshape(2**10, 2**10)


def model(*nodes, initializers=(), **options) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    graph = helper.make_graph(list(nodes), "graph", [x], [y], list(initializers), **options)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def product(matrix: TensorProto) -> onnx.ModelProto:
    return model(helper.make_node("MatMul", ["x", matrix.name], ["y"]), initializers=[matrix])


def write(folder, proto: onnx.ModelProto, name="model.onnx"):
    (folder / name).write_bytes(proto.SerializeToString())
    return folder / name


@pytest.mark.parametrize(
    "name", ["llama", "gpt2_merged", "llama_dynamo", "qwen3_genai_int4", "llama_fp16", "deltanet_ort"]
)
@pytest.mark.parametrize("smallest", [1, 100, 2**12])
def test_every_tensor_is_that_of_protobuf(name, smallest, monkeypatch):
    """Everything else of the model is, too: with the data put back it is the same message."""
    monkeypatch.setattr(inline_data, "MIN_DATA_BYTES", smallest)
    path = FIXTURES / name / "model.onnx"
    actual, expected, data = load_onnx_file(path), onnx.load(str(path), load_external_data=False), path.read_bytes()
    count = 0

    def put_back(message) -> None:
        nonlocal count
        if isinstance(message, TensorProto):
            places = {entry.key: entry.value for entry in message.external_data}
            if places.get("location") == path.name:
                offset, length = int(places["offset"]), int(places["length"])
                message.raw_data = data[offset : offset + length]
                del message.external_data[:]
                message.ClearField("data_location")
                count += 1
        for field, value in message.ListFields():
            if field.message_type is not None:
                for inner in [value] if hasattr(value, "ListFields") else value:
                    put_back(inner)

    put_back(actual)
    assert actual == expected
    assert count or smallest > 1


def test_the_data_is_not_in_memory(tmp_path):
    path = write(tmp_path, product(numpy_helper.from_array(LARGE, "w")))
    tracemalloc.start()
    try:
        program = read_onnx(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LARGE.nbytes / 2
    np.testing.assert_array_equal(program.tensors["w"].read(), LARGE)
    assert isinstance(program.tensors["w"].read().base, np.memmap | np.ndarray)


def test_a_constant_inside_a_branch_stays_in_the_file(tmp_path):
    def branch(name: str, factor: int):
        constant = helper.make_node("Constant", [], [f"{name}_w"], value=numpy_helper.from_array(LARGE * factor))
        nodes = [constant, helper.make_node("MatMul", ["x", f"{name}_w"], [name])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])

    condition = numpy_helper.from_array(np.array([True, False]), "c")
    reduce = helper.make_node("ReduceMin", ["x"], ["low"], keepdims=0)
    less = helper.make_node("Less", ["low", "zero"], ["is_low"])
    choose = helper.make_node("If", ["is_low"], ["y"], then_branch=branch("a", 1), else_branch=branch("b", 2))
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    program = read_onnx(write(tmp_path, model(reduce, less, choose, initializers=[zero, condition])))
    np.testing.assert_array_equal(program.tensors["b_w"].read(), LARGE * 2)
    assert len(inline_data.read_without_data(tmp_path / "model.onnx")) < 2000


@pytest.mark.parametrize("name", ["a b.onnx", "model", "ä:c.onnx", "x.json.onnx"])
def test_the_file_may_have_any_name(tmp_path, name):
    program = read_onnx(write(tmp_path, product(numpy_helper.from_array(LARGE, "w")), name))
    np.testing.assert_array_equal(program.tensors["w"].read(), LARGE)


def test_data_of_another_size_is_refused(tmp_path):
    tensor = numpy_helper.from_array(LARGE, "w")
    tensor.dims[0] += 1
    with pytest.raises(ConvertError, match="'w'"):
        read_onnx(write(tmp_path, product(tensor)))


def test_a_tensor_with_two_places_of_data_is_as_protobuf_reads_it(tmp_path):
    """The last one counts."""
    tensor = numpy_helper.from_array(LARGE, "w")
    twice = tensor.SerializeToString() + TensorProto(raw_data=(LARGE + 1).tobytes()).SerializeToString()
    graph = product(TensorProto(name="w"))
    del graph.graph.initializer[:]
    field = bytes([5 << 3 | 2]) + varint(len(twice)) + twice
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.SerializeToString() + bytes([7 << 3 | 2]) + varint(len(field)) + field)
    np.testing.assert_array_equal(read_onnx(path).tensors["w"].read(), LARGE + 1)


def varint(value: int) -> bytes:
    return inline_data._varint_bytes(value)


@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 2000))
def test_whatever_stands_in_the_file_is_read_as_protobuf_reads_it_or_refused(tmp_path_factory, noise, at, cut):
    data = product(numpy_helper.from_array(np.arange(64, dtype=np.float32).reshape(8, 8), "w")).SerializeToString()
    data = data[:at] + noise + data[at + cut :]
    path = tmp_path_factory.mktemp("noise") / "model.onnx"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline_data, "MIN_DATA_BYTES", 16)
        try:
            expected = onnx.load(str(path), load_external_data=False)
        except Exception:
            expected = None
        try:
            program = read_onnx(path)
        except ConvertError:
            return
    assert expected is not None
    arrays = {t.name: numpy_helper.to_array(t) for t in expected.graph.initializer if not t.external_data}
    for name, tensor in program.tensors.items():
        if name in arrays:
            np.testing.assert_array_equal(tensor.read(), arrays[name])
