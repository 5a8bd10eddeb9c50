"""Malicious ONNX files: each ends in a ConvertError or in a program, within a time and a memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights

ROOT = Path(__file__).parents[2]
F32, BOOL = TensorProto.FLOAT, TensorProto.BOOL
# The memory that reading may take: so many times the file, and what any file costs.
FACTOR, FLOOR = 64, 8 * 2**20
IMPORTS = [helper.make_opsetid("", 21), helper.make_opsetid("local", 1), helper.make_opsetid("com.microsoft", 1)]


def model(nodes, initializers=(), functions=(), outputs=("y",)) -> ModelProto:
    values = [helper.make_tensor_value_info("x", F32, [2, 3]), helper.make_tensor_value_info("c", BOOL, [])]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", values, results, list(initializers))
    return helper.make_model(graph, opset_imports=IMPORTS, functions=list(functions), ir_version=10)


def function(name: str, *calls: str) -> onnx.FunctionProto:
    """A function of one input that calls the others one after the other."""
    nodes = [helper.make_node(one, [f"v{i}"], [f"v{i + 1}"], domain="local") for i, one in enumerate(calls)]
    return helper.make_function("local", name, ["v0"], [f"v{len(calls)}"], nodes, IMPORTS)


def leaf() -> onnx.FunctionProto:
    return helper.make_function("local", "f0", ["v0"], ["v1"], [helper.make_node("Neg", ["v0"], ["v1"])], IMPORTS)


def call(name: str) -> NodeProto:
    return helper.make_node(name, ["x"], ["y"], domain="local")


def branch(value: str = "t") -> GraphProto:
    return helper.make_graph([helper.make_node("Neg", ["x"], [value])], "b", [], [onnx.ValueInfoProto(name=value)])


def nested(depth: int) -> GraphProto:
    """An If in an If in an If."""
    graph = branch()
    for _ in range(depth):
        node = helper.make_node("If", ["c"], ["t"], then_branch=graph, else_branch=branch())
        graph = helper.make_graph([node], "b", [], [onnx.ValueInfoProto(name="t")])
    return graph


def text(*lengths: int) -> TensorProto:
    return TensorProto(
        name="s", data_type=TensorProto.STRING, dims=[len(lengths)], string_data=[b"x" * n for n in lengths]
    )


MALICIOUS_MODELS = {
    "functions that double 40 times": lambda: model([call("f40")], (), [leaf(), *(function(f"f{i + 1}", f"f{i}", f"f{i}") for i in range(40))]),
    "functions that double 17 times": lambda: model([call("f17")], (), [leaf(), *(function(f"f{i + 1}", f"f{i}", f"f{i}") for i in range(17))]),
    "a function that calls itself": lambda: model([call("f1")], (), [function("f1", "f1")]),
    "functions that call each other": lambda: model([call("f1")], (), [function("f1", "f2"), function("f2", "f3"), function("f3", "f1")]),
    "a chain of 5,000 functions": lambda: model([call("f5000")], (), [leaf(), *(function(f"f{i + 1}", f"f{i}") for i in range(5000))]),
    "one long text among many": lambda: model([helper.make_node("Identity", ["s"], ["y"])], [text(10**6, *[0] * 5000)]),
    "one long text among many, in a node": lambda: model([helper.make_node("Constant", [], ["y"], value_strings=["x" * 10**6, *[""] * 5000])]),
    "5,000 branches with one name": lambda: model(
        [helper.make_node("If", ["c"], [f"o{i}" if i else "y"], then_branch=branch(), else_branch=branch()) for i in range(2500)]),
    "5,000 weights of one scope": lambda: model(
        [helper.make_node("Add", ["x", f"w#{i}"], [f"o{i}" if i else "y"], name="a") for i in range(5000)],
        [TensorProto(name=f"w#{i}", data_type=F32, dims=[3], raw_data=bytes(12)) for i in range(5000)]),
    "Ifs as deep as a file can hold them": lambda: model([helper.make_node("If", ["c"], ["y"], then_branch=nested(20), else_branch=branch())]),
    "nodes on a cycle": lambda: model([helper.make_node("Add", ["b", "x"], ["a"]), helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["y"])]),
    "a node that reads itself": lambda: model([helper.make_node("Add", ["y", "x"], ["y"])]),
    "a long chain in reverse order": lambda: model([*(helper.make_node("Neg", [f"n{i}"], [f"n{i + 1}"]) for i in range(5000, -1, -1)), helper.make_node("Neg", ["x"], ["n0"]), helper.make_node("Neg", ["n5000"], ["y"])]),
    "a weight of 2^60 elements": lambda: model([helper.make_node("Add", ["x", "w"], ["y"])], [TensorProto(name="w", data_type=F32, dims=[2**30, 2**30], raw_data=b"1234")]),
    "sizes whose product overflows": lambda: model([helper.make_node("Add", ["x", "w"], ["y"])], [TensorProto(name="w", data_type=F32, dims=[2**16] * 4 + [0], raw_data=b"")]),
    "a constant of 2^40 elements": lambda: model([helper.make_node("ConstantOfShape", ["n"], ["y"])], [numpy_helper.from_array(np.array([2**40]), "n")]),
    "an attribute of a million numbers": lambda: model([helper.make_node("Neg", ["x"], ["y"], junk=[1] * 10**6)]),
}  # fmt: skip


# Reads each file in a process of its own with a limit of its address space, so that what protobuf and ONNX's inliner
# allocate counts too.
READ_ALL = """
import os, resource, sys
from pathlib import Path
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.onnx_reader.reader import read_onnx

for name, most in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(most),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    try:
        name_weights(read_onnx(Path(name)))
    except ConvertError:
        pass
    except BaseException as problem:
        print(name, repr(problem)[:2000], file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def read_results(folder) -> tuple[dict[str, str], str]:
    """The exit code of reading each model, and what was printed for those that failed."""
    arguments = []
    for i, make in enumerate(MALICIOUS_MODELS.values()):
        path = folder / f"{i}.onnx"
        path.write_bytes(make().SerializeToString())
        arguments += [str(path), str(4 * FLOOR + FACTOR * path.stat().st_size)]
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return dict(zip(MALICIOUS_MODELS, done.stdout.split(), strict=True)), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the address space")
@pytest.mark.parametrize("name", MALICIOUS_MODELS)
def test_a_malicious_model_is_read_or_refused_within_the_limits(name, read_results):
    assert read_results[0][name] == "0", read_results[1]


EXTREMES = st.sampled_from(
    [0, 1, 2, -1, 7, 2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63)]
)
NAMES = st.sampled_from(["x", "c", "w", "v", "a", "b", "y", "", "é/:0"])
KINDS = st.sampled_from(
    ["Neg", "Add", "MatMul", "Reshape", "Cast", "CastLike", "Constant", "Gather", "Concat", "Slice", "If", "Loop", "QuantizeLinear",
     "Softmax", "Split", "f1", "f2", "SoftmaxCrossEntropyLoss", "GroupQueryAttention", "MatMulNBits", "Nothing"]
)  # fmt: skip
CODES = st.integers(0, 40)


@st.composite
def tensors(draw) -> TensorProto:
    """A tensor whose type, sizes and data need not fit together."""
    one = TensorProto(
        name=draw(NAMES), data_type=draw(CODES), dims=draw(st.lists(st.integers(0, 4) | EXTREMES, max_size=3))
    )
    form = draw(st.integers(0, 5))
    if form == 0:
        one.raw_data = draw(st.binary(max_size=64))
    elif form == 1:
        one.float_data.extend(draw(st.lists(st.floats(width=32), max_size=8)))
    elif form == 2:
        one.int32_data.extend(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)))
    elif form == 3:
        one.string_data.extend(draw(st.lists(st.binary(max_size=8), max_size=8)))
    elif form == 4:
        one.data_location = TensorProto.EXTERNAL
        for key in draw(st.lists(st.sampled_from(["location", "offset", "length", "checksum"]), max_size=4)):
            value = draw(
                st.sampled_from(["model.onnx", "data", "../data", "/etc/passwd", "", "."])
                | st.text(max_size=4)
                | EXTREMES.map(str)
            )
            one.external_data.add(key=key, value=value)
    return one


@st.composite
def attributes(draw, depth: int) -> AttributeProto:
    one = AttributeProto(
        name=draw(
            st.sampled_from(
                ["axis", "to", "value", "value_ints", "perm", "then_branch", "else_branch", "body", "axes", "K"]
            )
        )
    )
    one.type = draw(st.integers(0, 14))  # may differ from the type of the field that is set
    form = draw(st.integers(0, 5))
    if form == 0:
        one.i = draw(EXTREMES)
    elif form == 1:
        one.ints.extend(draw(st.lists(EXTREMES, max_size=4)))
    elif form == 2:
        one.s = draw(st.binary(max_size=4))
    elif form == 3:
        one.t.CopyFrom(draw(tensors()))
    elif form == 4 and depth:
        one.g.CopyFrom(draw(graphs(depth - 1)))
    elif form == 5:
        one.ref_attr_name = "axis"
    return one


@st.composite
def nodes(draw, depth: int) -> NodeProto:
    names = st.lists(NAMES, max_size=4)
    one = NodeProto(op_type=draw(KINDS), input=draw(names), output=draw(names), name=draw(NAMES))
    one.domain = draw(st.sampled_from(["", "", "", "ai.onnx", "local", "com.microsoft", "com.acme"]))
    one.attribute.extend(draw(st.lists(attributes(depth), max_size=3)))
    return one


@st.composite
def graphs(draw, depth: int = 2) -> GraphProto:
    one = GraphProto(
        name=draw(NAMES),
        node=draw(st.lists(nodes(depth), max_size=5)),
        initializer=draw(st.lists(tensors(), max_size=3)),
    )
    for values in (one.input, one.output, one.value_info):
        for name in draw(st.lists(NAMES, max_size=3)):
            value = helper.make_tensor_value_info(name, F32, draw(st.none() | st.lists(EXTREMES, max_size=3)))
            value.type.tensor_type.elem_type = draw(CODES)
            values.append(value)
    return one


@st.composite
def models(draw) -> ModelProto:
    one = ModelProto(ir_version=draw(st.integers(0, 14)), graph=draw(graphs()))
    for domain in draw(st.lists(st.sampled_from(["", "ai.onnx", "local", "com.microsoft"]), min_size=1, max_size=3)):
        one.opset_import.append(helper.make_opsetid(domain, draw(st.integers(1, 30) | EXTREMES)))
    for name in draw(st.lists(st.sampled_from(["f1", "f2"]), max_size=2)):
        body = draw(st.lists(nodes(1), max_size=3))
        one.functions.append(
            onnx.FunctionProto(name=name, domain="local", input=["x"], output=["y"], node=body, opset_import=IMPORTS)
        )
    return one


def read_or_refuse(data: bytes, path: Path) -> None:
    """Reads a file of these bytes into a program or a ConvertError, within the limit of Python's and NumPy's memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        program = read_onnx(path)
        for tensor in program.tensors.values():
            assert tensor.read().shape == tensor.shape
        name_weights(program).validate()
    except ConvertError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= FLOOR + FACTOR * len(data)


QUICK = settings(max_examples=150, deadline=5000, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])  # fmt: skip


@QUICK
@given(made=models())
def test_a_random_model_is_read_or_refused(made, folder):
    read_or_refuse(made.SerializeToString(), folder / "model.onnx")


@pytest.mark.slow
@QUICK
@given(data=st.data())
@pytest.mark.parametrize("name", ["llama_genai", "qwen2_dynamo_raw"])
def test_a_truncated_or_changed_file_is_read_or_refused(name, data, folder):
    whole = bytearray((ROOT / "tests" / "fixtures" / name / "model.onnx").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(whole) - 1))
        kind = data.draw(st.integers(0, 3))
        if kind == 0:
            whole[at] = data.draw(st.integers(0, 255))
        elif kind == 1:
            del whole[at : at + data.draw(st.integers(1, 64))]
        elif kind == 2:
            whole[at:at] = whole[: data.draw(st.integers(1, 64))]
        elif at:
            del whole[at:]
        if not whole:
            break
    read_or_refuse(bytes(whole), folder / "model.onnx")
