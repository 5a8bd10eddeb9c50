"""The reader: opsets, constants, graphs inside graphs, functions and names, against onnxruntime or ONNX's reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import toy
from onnx import TensorProto, helper, numpy_helper
from small import BOOL, F32, I64, X, agrees, branch, model, run

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.pipeline import convert


@pytest.mark.parametrize("opset", [11, 12, 13, 14, 15, 17, 18, 19, 20, 21, 22, 23])
def test_every_opset_from_11_on(opset, tmp_path):
    proto = toy.decoder(opset)
    folder = convert(toy.write(tmp_path / "source", proto), "model.onnx", tmp_path / "out", progress=False)
    ids = [3, 1, 15, 7, 7]
    np.testing.assert_allclose(toy.converted_logits(folder, ids), toy.onnxruntime_logits(proto, ids), atol=1e-4)


CONSTANTS = {
    "value": (numpy_helper.from_array(X[0]), X[0]),
    "value_float": (1.5, np.array(1.5, np.float32)),
    "value_floats": ([1.5, -2.5, 3.5], np.array([1.5, -2.5, 3.5], np.float32)),
    "value_int": (3, np.array(3, np.int64)),
    "value_ints": ([3, -4, 5], np.array([3, -4, 5], np.int64)),
    "value_string": ("é", np.array("é")),
    "value_strings": (["a", "", "ü"], np.array(["a", "", "ü"])),
    "sparse_value": (
        helper.make_sparse_tensor(
            helper.make_tensor("v", F32, [2], [7.0, -8.0]), helper.make_tensor("i", I64, [2], [0, 2]), [3]
        ),
        np.array([7, 0, -8], np.float32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", CONSTANTS)
def test_every_form_of_constant(form):
    value, wanted = CONSTANTS[form]
    node = onnx.NodeProto(op_type="Constant", output=["c"])
    node.attribute.append(helper.make_attribute(form, value))
    kind = {"f": F32, "i": I64, "U": TensorProto.STRING}[wanted.dtype.kind]
    program = read_onnx(model([node], inputs=(), outputs=("c",)))
    assert not program.nodes
    found = program.constants["c"] if "c" in program.constants else program.tensors["c"].read()
    assert found.tolist() == wanted.tolist()
    assert found.dtype.kind == np.dtype(helper.tensor_dtype_to_np_dtype(kind)).kind or kind == TensorProto.STRING
    assert found.shape == wanted.shape


def test_a_constant_without_a_value_or_with_two_is_refused():
    for attrs in ({}, {"value_int": 1, "value_float": 1.0}):
        node = helper.make_node("Constant", [], ["c"], name="odd", **attrs)
        with pytest.raises(ConvertError) as error:
            read_onnx(model([node], inputs=(), outputs=("c",)))
        assert error.value.node == "Constant 'odd'"


def sparse(name, values, indices, dims):
    indices = np.array(indices, np.int64)
    return helper.make_sparse_tensor(
        helper.make_tensor(name, F32, [len(values)], values),
        helper.make_tensor("i", I64, list(indices.shape), indices.ravel().tolist()), dims,
    )  # fmt: skip


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]], ids=["linear", "by axes"])
def test_sparse_initializers_become_dense(indices):
    proto = model([helper.make_node("Add", ["x", "s"], ["y"])], sparse=[sparse("s", [10.0, 20.0], indices, [2, 3])])
    (added,) = run(read_onnx(proto), x=X).values()
    assert (added - X).tolist() == [[0, 10, 0], [0, 0, 20]]


@pytest.mark.parametrize(
    ("indices", "dims"),
    [([1, 6], [2, 3]), ([-1, 2], [2, 3]), ([[0, 1], [2, 0]], [2, 3]), ([[0, 1, 1], [1, 1, 1]], [2, 3])],
)
def test_sparse_indices_outside_are_refused(indices, dims):
    proto = model([helper.make_node("Add", ["x", "s"], ["y"])], sparse=[sparse("s", [1.0, 2.0], indices, dims)])
    program = read_onnx(proto)
    with pytest.raises(ConvertError, match="sparse tensor 's'"):
        program.tensors["s"].read()


def test_a_sparse_tensor_that_would_fill_memory_is_refused():
    for dims in ([2**30, 2**30], [2**60], [-1, 3]):
        with pytest.raises(ConvertError):
            read_onnx(model([helper.make_node("Identity", ["s"], ["y"])], sparse=[sparse("s", [1.0], [0], dims)]))


def test_an_initializer_that_is_also_an_input_is_a_weight():
    """ONNX before IR 4 listed every initializer among the inputs."""
    node = helper.make_node("Add", ["x", "w"], ["y"])
    proto = model(
        [node], initializers=[numpy_helper.from_array(X, "w")], inputs=(("x", F32, [2, 3]), ("w", F32, [2, 3]))
    )
    program = read_onnx(proto)
    assert [value.name for value in program.inputs] == ["x"]
    assert run(program, x=X)["y"].tolist() == (X + X).tolist()


def test_branches_may_use_the_names_of_their_siblings_and_have_initializers():
    """Both branches compute "t" and have an initializer "w" of their own; both read the graph around them."""
    then = branch(
        [helper.make_node("Mul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "outer"], ["r"])], "r",
        [numpy_helper.from_array(np.full(3, 2, np.float32), "w")],
    )  # fmt: skip
    other = branch(
        [helper.make_node("Sub", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "outer"], ["r"])], "r",
        [numpy_helper.from_array(np.full(3, 5, np.float32), "w")],
    )  # fmt: skip
    for taken in (True, False):
        proto = model(
            [
                helper.make_node("Neg", ["x"], ["outer"]),
                helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other),
                helper.make_node("Mul", ["y", "y"], ["t"]),  # the graph has a "t" of its own, after the branches
            ],
            initializers=[numpy_helper.from_array(np.array(taken), "flag")],
            outputs=("y", "t"),
        )
        program = agrees(proto, x=X)  # whose outputs keep their names
        assert len(program.tensors) == 2
        names = [name for node in program.all_nodes() for name in node.outputs]
        assert len(set(names)) == len(names)


def test_a_branch_may_reuse_a_name_of_the_graph_around_it():
    """The inner "h" is another value than the outer one, which is read after the branch."""
    then = branch([helper.make_node("Neg", ["x"], ["h"])], "h")
    other = branch([helper.make_node("Abs", ["x"], ["h"])], "h")
    proto = model(
        [
            helper.make_node("Add", ["x", "x"], ["h"]),
            helper.make_node("If", ["flag"], ["i"], then_branch=then, else_branch=other),
            helper.make_node("Sub", ["h", "i"], ["y"]),
        ],
        initializers=[numpy_helper.from_array(np.array(True), "flag")],
    )
    assert run(read_onnx(proto), x=X)["y"].tolist() == (X + X + X).tolist()


def test_a_branch_inside_a_loop_body():
    inner = branch([helper.make_node("Mul", ["s", "x"], ["m"])], "m")
    plain = branch([helper.make_node("Identity", ["s"], ["m"])], "m")
    body = helper.make_graph(
        [
            helper.make_node("If", ["flag"], ["n"], then_branch=inner, else_branch=plain),
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Identity", ["n"], ["scan"]),
        ],
        "body",
        [helper.make_tensor_value_info("i", I64, []), helper.make_tensor_value_info("go", BOOL, []), helper.make_tensor_value_info("s", F32, [2, 3])],
        [helper.make_tensor_value_info("go_on", BOOL, []), helper.make_tensor_value_info("n", F32, [2, 3]), helper.make_tensor_value_info("scan", F32, [2, 3])],
    )  # fmt: skip
    proto = model(
        [helper.make_node("Loop", ["three", "", "x"], ["y", "all"], body=body)],
        initializers=[numpy_helper.from_array(np.array(3), "three"), numpy_helper.from_array(np.array(True), "flag")],
        outputs=("y", "all"),
    )
    found = run(read_onnx(proto), x=X)
    np.testing.assert_allclose(found["y"], X**4, rtol=1e-5)
    np.testing.assert_allclose(found["all"], np.stack([X**2, X**3, X**4]), rtol=1e-5)


def test_functions_of_the_model_are_inlined():
    """A function calls a function and passes it an attribute of its own."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    leak = helper.make_node("LeakyRelu", ["a"], ["b"])
    reference_ = onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    leak.attribute.append(reference_)
    inner = helper.make_function("local", "Leak", ["a"], ["b"], [leak], imports, attributes=["slope"])
    call = helper.make_node("Leak", ["p"], ["q"], domain="local")
    call.attribute.append(onnx.AttributeProto(name="slope", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    outer = helper.make_function(
        "local",
        "Twice",
        ["p"],
        ["r"],
        [call, helper.make_node("Add", ["q", "q"], ["r"])],
        imports,
        attributes=["slope"],
    )
    nodes = [
        helper.make_node("Twice", ["x"], ["h"], domain="local", slope=0.25),
        helper.make_node("Twice", ["h"], ["y"], domain="local", slope=0.5),
    ]
    program = read_onnx(model(nodes, functions=[inner, outer]))
    assert {node.op for node in program.nodes} == {"LeakyRelu-6", "Add-7"}
    wanted = X
    for slope in (0.25, 0.5):
        wanted = 2 * np.where(wanted < 0, slope * wanted, wanted)
    np.testing.assert_allclose(run(program, x=X)["y"], wanted)


def test_functions_that_call_themselves_are_refused():
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    functions = [
        helper.make_function(
            "local", name, ["a"], ["b"], [helper.make_node(calls, ["a"], ["b"], domain="local")], imports
        )
        for name, calls in (("F", "G"), ("G", "F"))
    ]
    with pytest.raises(ConvertError, match="functions that cannot be inlined"):
        read_onnx(model([helper.make_node("F", ["x"], ["y"], domain="local")], functions=functions))


def test_functions_that_come_to_a_billion_nodes_are_refused_before_they_are_inlined():
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    functions = [helper.make_function("local", "f0", ["a0"], ["b"], [helper.make_node("Neg", ["a0"], ["b"])], imports)]
    for i in range(1, 10):
        nodes = [helper.make_node(f"f{i - 1}", [f"a{j}"], [f"a{j + 1}"], domain="local") for j in range(10)]
        functions.append(helper.make_function("local", f"f{i}", ["a0"], ["a10"], nodes, imports))
    with pytest.raises(ConvertError, match="1000000000 nodes"):
        read_onnx(model([helper.make_node("f9", ["x"], ["y"], domain="local")], functions=functions))


@pytest.mark.parametrize(
    ("op", "inputs", "attrs"),
    [("MeanVarianceNormalization", ["x"], {"axes": [1]}), ("CenterCropPad", ["x", "size"], {"axes": [0, 1]})],
)
def test_an_undeclared_operator_is_expanded_into_the_body_of_its_schema(op, inputs, attrs, monkeypatch):
    form = ops.resolve_operator
    monkeypatch.setattr(ops, "resolve_operator", lambda kind, opset: None if kind == op else form(kind, opset))
    size = numpy_helper.from_array(np.array([4, 2]), "size")
    proto = model([helper.make_node(op, inputs, ["y"], **attrs)], initializers=[size])
    typed = [helper.make_tensor_value_info("x", F32, [2, 3])]
    del proto.graph.input[:]
    proto.graph.input.extend(typed)
    program = agrees(proto, x=X)
    assert len(program.nodes) > 1


@pytest.mark.parametrize(
    "op",
    ["Elu", "HardSigmoid", "LeakyRelu", "MeanVarianceNormalization", "Selu", "Shrink", "Swish", "ThresholdedRelu"],
)
def test_the_body_of_a_schema_gets_the_defaults_of_attributes_that_are_left_out(op, monkeypatch):
    form = ops.resolve_operator
    monkeypatch.setattr(ops, "resolve_operator", lambda kind, opset: None if kind == op else form(kind, opset))
    proto = model([helper.make_node(op, ["x"], ["y"], **({"axes": [1]} if op.startswith("Mean") else {}))], opset=24)
    program = agrees(proto, x=X)
    assert len(program.nodes) > 1


@pytest.mark.parametrize(
    "domains", [("com.microsoft",), ("ai.onnx",), ("", "com.microsoft", "com.acme"), ("ai.onnx.ml",)]
)
def test_opset_imports_in_any_number_and_spelling(domains):
    """Without a version of ONNX's own operators the newest is used, as in onnxruntime."""
    proto = model([helper.make_node("Relu", ["x"], ["h"]), helper.make_node("ReduceSum", ["h", "a"], ["y"])],
                  initializers=[numpy_helper.from_array(np.array([1]), "a")])  # fmt: skip
    del proto.opset_import[:]
    proto.opset_import.extend(helper.make_opsetid(name, 18 if name in ("", "ai.onnx") else 1) for name in domains)
    program = read_onnx(proto)
    assert [node.op for node in program.nodes] == ["Relu-6", "ReduceSum-13"]
    assert run(program, x=X)["y"].tolist() == np.maximum(X, 0).sum(1, keepdims=True).tolist()


def test_a_model_without_opset_imports_is_refused(tmp_path):
    proto = model([helper.make_node("Relu", ["x"], ["y"])])
    del proto.opset_import[:]
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ConvertError, match="without a graph"):
        read_onnx(tmp_path / "model.onnx")


def test_unsupported_operators_are_listed_at_once_with_a_node_each():
    imports = [*toy.decoder().opset_import, helper.make_opsetid("com.acme", 1)]
    proto = toy.decoder()
    extra = [
        helper.make_node("Frobnicate", ["x"], ["f1"], name="/model/frob"),
        helper.make_node("Frobnicate", ["x"], ["f2"], name="/model/frob_2"),
        helper.make_node("Blend", ["x"], ["f3"], domain="com.acme"),
        helper.make_node("If", ["flag"], ["f4"], then_branch=branch([helper.make_node("Hidden", ["x"], ["h"])], "h"), else_branch=branch([], "x")),
        helper.make_node("Nameless", ["x"], []),
    ]  # fmt: skip
    proto.graph.node.extend(extra)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "flag"))
    del proto.opset_import[:]
    proto.opset_import.extend(imports)
    with pytest.raises(ConvertError) as error:
        read_onnx(proto)
    for text in (
        "Frobnicate (2, such as '/model/frob')",
        "com.acme.Blend (1, such as 'f3')",
        "Hidden (1, such as 'h')",
        "Nameless (1,",
    ):
        assert text in error.value.found
    assert error.value.do


def test_ai_onnx_is_the_default_domain():
    node = helper.make_node("Add", ["x", "x"], ["y"], domain="ai.onnx")
    assert read_onnx(model([node])).nodes[0].op == "Add-7"


def test_an_input_that_is_left_out_is_an_empty_name_unless_it_is_the_last():
    clip = helper.make_node("Clip", ["x", "", "high"], ["y"])
    program = agrees(model([clip], initializers=[numpy_helper.from_array(np.array(1, np.float32), "high")]), x=X)
    assert program.nodes[0].inputs == ("x", "", "high")
    trailing = helper.make_node("Clip", ["x", "low", ""], ["y"])
    program = agrees(model([trailing], initializers=[numpy_helper.from_array(np.array(0, np.float32), "low")]), x=X)
    assert program.nodes[0].inputs == ("x", "low")


def test_nodes_may_stand_in_any_order():
    """As in onnxruntime, also where branches read the graph around them."""
    then = branch([helper.make_node("Mul", ["late", "x"], ["t"])], "t")
    other = branch([helper.make_node("Neg", ["late"], ["e"])], "e")
    proto = model(
        [
            helper.make_node("Add", ["i", "late"], ["y"]),
            helper.make_node("If", ["flag"], ["i"], then_branch=then, else_branch=other),
            helper.make_node("Abs", ["x"], ["late"]),
        ],
        initializers=[numpy_helper.from_array(np.array(True), "flag")],
    )
    np.testing.assert_allclose(run(read_onnx(proto), x=X)["y"], np.abs(X) * X + np.abs(X))


def changed_model(change):
    proto = model(
        [
            helper.make_node("Neg", ["x"], ["h"], name="first"),
            helper.make_node("Add", ["h", "w"], ["y"], name="second"),
        ],
        initializers=[numpy_helper.from_array(X, "w")],
    )
    change(proto.graph)
    return proto


INVALID = {
    "a value that no node computes": (lambda g: g.node[1].input.__setitem__(0, "nothing"), "the input 'nothing'"),
    "nodes in a circle": (lambda g: g.node[0].input.__setitem__(0, "y"), "the input 'y'"),
    "a node that reads itself": (lambda g: g.node[0].input.__setitem__(0, "h"), "the input 'h'"),
    "an output that no node computes": (lambda g: g.output.append(onnx.ValueInfoProto(name="z")), "the output 'z'"),
    "a value defined twice": (lambda g: g.node.append(helper.make_node("Abs", ["x"], ["h"])), "the value 'h' defined twice"),
    "a value that is an input and a node's": (lambda g: g.node.append(helper.make_node("Abs", ["h"], ["x"])), "the value 'x' defined twice"),
    "an initializer defined twice": (lambda g: g.initializer.append(numpy_helper.from_array(X, "w")), "the value 'w' defined twice"),
    "an attribute of no type": (lambda g: g.node[0].attribute.append(onnx.AttributeProto(name="odd")), "the attribute 'odd'"),
    "a list of graphs": (
        lambda g: g.node[0].attribute.append(onnx.AttributeProto(name="odd", type=onnx.AttributeProto.GRAPHS)), "the attribute 'odd'"
    ),
    "an axis that no array has": (lambda g: g.initializer[0].dims.__setitem__(0, -2), "the tensor 'w'"),
    "an axis beyond every limit": (lambda g: g.initializer[0].dims.__setitem__(0, 2**62), "the tensor 'w'"),
    "too many axes": (lambda g: g.initializer[0].dims.extend([1] * 100), "the tensor 'w'"),
    "too few elements": (lambda g: g.initializer[0].dims.__setitem__(0, 3), "24 bytes of data for the tensor 'w'"),
    "no type": (lambda g: setattr(g.initializer[0], "data_type", 0), "the tensor 'w' of type 0"),
    "an unknown type": (lambda g: setattr(g.initializer[0], "data_type", 99), "the tensor 'w' of type 99"),
}  # fmt: skip


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_graph_is_refused(what):
    run(read_onnx(changed_model(lambda graph: None)), x=X)
    change, found = INVALID[what]
    with pytest.raises(ConvertError) as error:
        read_onnx(changed_model(change))
    assert found in error.value.found


def test_sizes_that_no_axis_has_are_unknown():
    proto = model([helper.make_node("Neg", ["x"], ["y"])], inputs=(("x", F32, [-1, 2**62, "n", None, 0, 7]),))
    assert read_onnx(proto).inputs[0].shape == (None, None, "n", None, 0, 7)


def test_large_integers_are_weights_and_small_ones_constants():
    few, many = np.arange(4096), np.arange(4097)
    nodes = [
        helper.make_node("Gather", ["x", "few"], ["a"], axis=1),
        helper.make_node("Gather", ["x", "many"], ["b"], axis=1),
    ]
    tensors = [
        numpy_helper.from_array(few, "few"),
        numpy_helper.from_array(many, "many"),
        numpy_helper.from_array(X[0], "w"),
    ]
    program = read_onnx(model(nodes, initializers=tensors, outputs=("a", "b")))
    assert set(program.constants) == {"few"}
    assert set(program.tensors) == {"many", "w"}


def changed_attribute(op: str, name: str, attribute: onnx.AttributeProto, domain: str = "") -> onnx.ModelProto:
    node = helper.make_node(op, ["x"], ["y"], name="odd", domain=domain)
    attribute.name = name
    node.attribute.append(attribute)
    return model([node])


@pytest.mark.parametrize(
    ("op", "name", "value", "domain", "match"),
    [
        ("Transpose", "perm", 2, "", "'perm' of type INT; expected the type INTS"),
        ("Softmax", "axis", [1], "", "'axis' of type INTS; expected the type INT"),
        ("LeakyRelu", "alpha", "much", "", "'alpha' of type STRING; expected the type FLOAT"),
        ("QuickGelu", "alpha", 1, "com.microsoft", "'alpha' of type INT; expected the type FLOAT"),
    ],
)
def test_an_attribute_of_another_type_than_the_operators_is_refused(op, name, value, domain, match):
    """As onnxruntime refuses it: by ONNX's schema, or by that of com.microsoft."""
    proto = changed_attribute(op, name, helper.make_attribute(name, value), domain)
    with pytest.raises(ConvertError, match=match) as error:
        read_onnx(proto)
    assert error.value.node == f"{op} 'odd'"
    ort = pytest.importorskip("onnxruntime")
    with pytest.raises(Exception, match=name):
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("text", ["A", "b" * 9])
def test_the_declared_type_of_an_attribute_must_be_that_of_its_value(text):
    """The value stands in a field of its own type; one that names another field has the value that an empty field has."""
    attribute = helper.make_attribute("value_string", text)
    attribute.type = onnx.AttributeProto.FLOATS
    proto = changed_attribute("Constant", "value_string", attribute)
    del proto.graph.node[0].input[:]
    with pytest.raises(ConvertError, match="'value_string' of type FLOATS; expected the type STRING"):
        read_onnx(proto)
