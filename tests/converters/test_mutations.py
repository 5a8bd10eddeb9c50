"""Mutated files: whatever a file holds, it is refused with an error or its conversion agrees with onnxruntime."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES
from onnx import AttributeProto, TensorProto, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert

pytestmark = pytest.mark.slow

IDS = [3, 1, 7, 5]
LIMITS = [0, 1, -1, 2, 7, -2, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, -(2**63), 2**63 - 1]
OPERATORS = [
    "Tile",
    "Pad",
    "Expand",
    "ConstantOfShape",
    "Range",
    "NonZero",
    "TopK",
    "Slice",
    "Split",
    "CumSum",
    "Trilu",
    "OneHot",
    "EyeLike",
    "GatherND",
    "ScatterND",
    "GatherElements",
    "Compress",
    "Mod",
    "Pow",
    "Div",
    "ReduceSum",
    "ArgMax",
    "Size",
    "Where",
    "Max",
    "Min",
    "Clip",
    "Sqrt",
    "Log",
    "Exp",
    "Reshape",
    "Flatten",
    "Concat",
    "Squeeze",
    "Identity",
    "Gather",
]


@pytest.fixture
def time_limit():
    """Ends a conversion that hangs."""

    def hangs(*args):
        raise TimeoutError("the conversion hangs")

    old = signal.signal(signal.SIGALRM, hangs)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


def mutate_bytes(data: bytes, draw: np.random.Generator) -> bytes:
    """Returns data with bits flipped, and bytes set, removed, inserted and copied from elsewhere."""
    new = bytearray(data)
    for _ in range(draw.integers(1, 4)):
        at, size = int(draw.integers(len(new))), int(draw.integers(1, 9))
        kind = draw.integers(5)
        if kind == 0:
            new[at] ^= 1 << int(draw.integers(8))
        elif kind == 1:
            new[at] = int(draw.integers(256))
        elif kind == 2:
            del new[at : at + size]
        elif kind == 3:
            new[at:at] = draw.bytes(size)
        else:
            start = int(draw.integers(len(new)))
            new[at : at + size] = new[start : start + size]
    return bytes(new)


class GraphMutation:
    """Draws changes of a graph and makes them in place, in `model`."""

    def __init__(self, model: onnx.ModelProto, draw: np.random.Generator):
        self.model, self.graph, self.draw = model, model.graph, draw
        self.names = [name for node in self.graph.node for name in (*node.input, *node.output)]
        self.integers = [tensor for tensor in self.graph.initializer if tensor.data_type == TensorProto.INT64]

    def pick(self, values):
        return values[int(self.draw.integers(len(values)))]

    def reverse_inputs(self, node: onnx.NodeProto) -> None:
        if len(node.input) > 1:
            node.input.reverse()

    def replace_input(self, node: onnx.NodeProto) -> None:
        if node.input:
            node.input[int(self.draw.integers(len(node.input)))] = self.pick(self.names)

    def replace_operator(self, node: onnx.NodeProto) -> None:
        node.op_type = self.pick(OPERATORS)

    def replace_attribute(self, node: onnx.NodeProto) -> None:
        if not node.attribute:
            return
        attribute = self.pick(node.attribute)
        if attribute.type == AttributeProto.INT:
            attribute.i = self.pick(LIMITS)
        elif attribute.type == AttributeProto.INTS and attribute.ints:
            attribute.ints[int(self.draw.integers(len(attribute.ints)))] = self.pick(LIMITS)

    def replace_integer(self, node: onnx.NodeProto) -> None:
        if self.integers:
            tensor = self.pick(self.integers)
            array = numpy_helper.to_array(tensor).copy()
            array.reshape(-1)[:1] = self.pick(LIMITS)
            toy.replace(self.model, tensor.name, numpy_helper.from_array(array))

    def resize_weight(self, node: onnx.NodeProto) -> None:
        if (tensor := self.pick(self.graph.initializer)).dims:
            tensor.dims[0] = self.pick(LIMITS)

    def resize_declared_axis(self, node: onnx.NodeProto) -> None:
        if axes := self.pick([*self.graph.input, *self.graph.output]).type.tensor_type.shape.dim:
            self.pick(axes).dim_value = self.pick(LIMITS)

    def retype_input(self, node: onnx.NodeProto) -> None:
        self.pick(self.graph.input).type.tensor_type.elem_type = int(self.draw.integers(30))

    def drop_last_input(self, node: onnx.NodeProto) -> None:
        del node.input[-1:]


# Each entry is equally likely, so an integer of the weights is replaced twice as often.
GRAPH_MUTATIONS = (
    GraphMutation.reverse_inputs,
    GraphMutation.replace_input,
    GraphMutation.replace_operator,
    GraphMutation.replace_attribute,
    GraphMutation.replace_integer,
    GraphMutation.replace_integer,
    GraphMutation.resize_weight,
    GraphMutation.resize_declared_axis,
    GraphMutation.retype_input,
    GraphMutation.drop_last_input,
)


def mutate_graph(data: bytes, draw: np.random.Generator) -> bytes:
    """Returns the graph of data with other operators, inputs, numbers, sizes or types."""
    mutation = GraphMutation(onnx.ModelProto.FromString(data), draw)
    for _ in range(draw.integers(1, 4)):
        mutate = GRAPH_MUTATIONS[int(draw.integers(len(GRAPH_MUTATIONS)))]
        mutate(mutation, mutation.pick(mutation.graph.node))
    return mutation.model.SerializeToString()


def is_converted(source, out, time_limit) -> bool:
    """Returns whether the source was converted, and checks that a refused one left nothing behind."""
    converted = True
    time_limit(60)
    try:
        convert(source, "model.onnx", out, progress=False)
    except ConvertError:
        converted = False
    finally:
        time_limit(0)
    assert out.exists() == converted
    assert not list(out.parent.glob(".*"))
    return converted


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_graph])
def test_a_mutated_toy_is_refused_or_converted_right(mutate, tmp_path, time_limit):
    source = toy.write(tmp_path / "source", toy.decoder())
    whole = (source / "model.onnx").read_bytes()
    converted, agreed = 0, 0
    for seed in range(100):
        out = tmp_path / f"out{seed}"
        (source / "model.onnx").write_bytes(mutate(whole, np.random.default_rng(seed)))
        if not is_converted(source, out, time_limit):
            continue
        converted += 1
        try:
            expected = toy.onnxruntime_logits(source / "model.onnx", IDS)
        except Exception:
            continue  # onnxruntime is stricter about declared types and sizes
        agreed += 1
        logits = toy.converted_logits(out, IDS)
        assert (np.isfinite(logits) == np.isfinite(expected)).all(), seed
        spread = np.ptp(expected[np.isfinite(expected)])
        np.testing.assert_allclose(logits, expected, atol=1e-3 * spread, err_msg=str(seed))
    assert 100 > converted >= agreed >= 5


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_graph])
def test_a_mutated_file_of_the_model_builder_is_refused_or_converted(mutate, tmp_path, time_limit):
    """A graph of com.microsoft operators over external data."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "llama_genai", source)
    whole = (source / "model.onnx").read_bytes()
    outcomes = set()
    for seed in range(20):
        (source / "model.onnx").write_bytes(mutate(whole, np.random.default_rng(seed)))
        outcomes.add(is_converted(source, tmp_path / f"out{seed}", time_limit))
    assert outcomes == {True, False}


GATHER = {"an index past the end": 2**25 + 2, "an index before the beginning": -5, "an index of 64 bits": 2**40}


@pytest.mark.parametrize("what", GATHER)
def test_an_index_into_a_shape_is_checked_before_it_is_read(what, tmp_path, time_limit):
    """MLX reads whatever memory lies there, or ends the process."""
    model = toy.decoder()
    toy.replace(model, "two", numpy_helper.from_array(np.array(GATHER[what])))
    with pytest.raises(ConvertError, match="indices from") as error:
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)
    assert "Gather" in error.value.node


@pytest.mark.parametrize("place", [toy.VOCAB, -toy.VOCAB - 1, 2**31])
def test_constant_ids_outside_a_table_are_refused(place, tmp_path):
    model = toy.decoder()
    model.graph.initializer.append(numpy_helper.from_array(np.array([[place]]), "ids"))
    extra = onnx.helper.make_node("Gather", ["model.embed.weight", "ids"], ["extra"])
    model.graph.node.insert(1, extra)
    model.graph.node.insert(2, onnx.helper.make_node("Add", ["embedded", "extra"], ["summed"]))
    toy.node(model, "x").input[0] = "summed"
    with pytest.raises(ConvertError, match="indices from"):
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)


def test_a_graph_that_does_not_read_its_tokens_is_refused(tmp_path):
    model = toy.decoder()
    toy.node(model, "embedded").input[1] = "ids"
    model.graph.initializer.append(numpy_helper.from_array(np.array([[3, 1]]), "ids"))
    with pytest.raises(ConvertError, match="expected input_ids"):
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)


@pytest.mark.parametrize("start", [-(2**26), -(2**31), -(2**62)])
def test_a_range_larger_than_memory_is_refused(start, tmp_path, time_limit):
    model = toy.decoder()
    toy.replace(model, "zero0", numpy_helper.from_array(np.array(start)))
    with pytest.raises(ConvertError, match="a range of") as error:
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)
    assert "Range" in error.value.node


@pytest.mark.parametrize("trips", [2**62])
def test_a_loop_without_end_is_refused(trips, tmp_path, time_limit):
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["go"], ["on"])], "body",
        [onnx.helper.make_tensor_value_info("i", TensorProto.INT64, []), onnx.helper.make_tensor_value_info("go", TensorProto.BOOL, [])],
        [onnx.helper.make_tensor_value_info("on", TensorProto.BOOL, []), onnx.helper.make_tensor_value_info("i", TensorProto.INT64, [])],
    )  # fmt: skip
    model = toy.decoder()
    for name, value in (("true", True), ("trips", trips or 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    for node in (
        onnx.helper.make_node("Loop", ["trips" if trips else "", "true"], ["turns"], body=body, name="endless"),
        onnx.helper.make_node("ReduceMax", ["turns"], ["most"], keepdims=0),
        onnx.helper.make_node("Cast", ["most"], ["bias"], to=TensorProto.FLOAT),
    ):
        model.graph.node.insert(len(model.graph.node) - 1, node)
    toy.node(model, "logits").input[1] = "bias"
    time_limit(60)
    with pytest.raises(ConvertError, match="a loop that goes on") as error:
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)
    assert error.value.node == "Loop-1 'endless'"


@pytest.mark.parametrize("size", [2**31 - 1, 2**40, 2**62])
@pytest.mark.parametrize("op", ["Expand", "ConstantOfShape", "Tile", "Pad"])
def test_constants_larger_than_memory_are_refused(op, size, tmp_path, time_limit):
    model = toy.decoder()
    shape = {"Tile": [size], "Pad": [size, size]}.get(op, [size, 4, toy.VOCAB])
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape), "large"))
    inputs = {"ConstantOfShape": ["large"]}.get(op, ["head.bias", "large"])
    for node in (
        onnx.helper.make_node(op, inputs, ["huge"]),
        onnx.helper.make_node("ReduceMax", ["huge"], ["most"], keepdims=0),
    ):
        model.graph.node.insert(len(model.graph.node) - 1, node)
    toy.node(model, "logits").input[1] = "most"
    with pytest.raises(ConvertError) as error:
        convert(toy.write(tmp_path / "s", model), "model.onnx", tmp_path / "out", progress=False)
    assert error.value.node.startswith(op)
