"""Program: its JSON, its check, and hostile files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_transmuter.program import (
    ONNX_DTYPES,
    PROGRAM_FORMAT,
    PROGRAM_VERSION,
    Node,
    Program,
    ProgramError,
    Value,
    WeightInfo,
    load_program,
    program_from_json,
    program_to_json,
    save_program,
)
from mlx_transmuter.program.metadata import Metadata, NodeCounts, RewriteSummary, SourceFile

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
CONSTANTS = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
FLOATS = [0.0, -0.0, 1.5, -3.25, 1e-5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308]


def number(draw, dtype: np.dtype):
    if dtype.kind == "b":
        return draw(st.booleans())
    if dtype.kind == "f":
        width = dtype.itemsize * 8
        return draw(st.one_of(st.sampled_from(FLOATS[:8]), st.floats(width=width)))
    limits = np.iinfo(dtype)
    return draw(st.one_of(st.sampled_from([limits.min, limits.max]), st.integers(int(limits.min), int(limits.max))))


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape))
    if draw(st.booleans()) and count:
        # numpy drops zeros at the end of text
        texts = [draw(st.text(max_size=4)).rstrip("\0") for _ in range(count)]
        return np.array(texts, np.str_).reshape(shape)
    dtype = np.dtype(draw(st.sampled_from(CONSTANTS)))
    return np.array([number(draw, dtype) for _ in range(count)], dtype).reshape(shape)


@st.composite
def programs(draw, depth: int = 2, outer: tuple[str, ...] = ()):
    """Valid programs with branches; every value has a name of its own."""
    prefix = f"{'b' * (3 - depth)}{draw(st.integers(0, 10**6))}"
    count = iter(range(10**6))

    def name() -> str:
        return f"{prefix}/{next(count)}{draw(NAMES)}"

    axes = st.one_of(st.none(), st.integers(0, 2**40), NAMES)
    shapes = st.one_of(st.none(), st.lists(axes, max_size=3).map(tuple))
    inputs = tuple(
        Value(name(), draw(st.sampled_from(sorted(ONNX_DTYPES))), draw(shapes)) for _ in range(draw(st.integers(0, 2)))
    )
    constants = {name(): draw(arrays()) for _ in range(draw(st.integers(0, 2)))}
    weights = {}
    if depth == 2:
        sizes = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
        weights = {
            name(): WeightInfo(draw(st.sampled_from(sorted(ONNX_DTYPES))), draw(sizes))
            for _ in range(draw(st.integers(0, 2)))
        }
    known = [*outer, *(value.name for value in inputs), *constants, *weights]
    nodes = []
    for _ in range(draw(st.integers(1, 3))):
        reads = tuple(draw(st.lists(st.sampled_from([*known, ""]), max_size=3)))
        values = st.one_of(
            st.integers(-(2**63), 2**63 - 1), st.sampled_from(FLOATS), st.text(max_size=4), arrays(),
            st.lists(st.integers(-9, 9), max_size=3), st.lists(st.sampled_from(FLOATS), max_size=3),
        )  # fmt: skip
        attrs = {draw(NAMES): draw(values) for _ in range(draw(st.integers(0, 2)))}
        if depth and draw(st.booleans()):
            attrs["body"] = draw(programs(depth - 1, tuple(known)))
        gives = (name(), *draw(st.lists(st.just(""), max_size=1)))
        nodes.append(
            Node(
                draw(st.sampled_from(["Add-7", "mlx.linear", "com.microsoft.Gelu-1"])), reads, gives, attrs, draw(NAMES)
            )
        )
        known.append(gives[0])
    outputs = tuple(
        Value(one, "float32", None) for one in draw(st.lists(st.sampled_from(known), max_size=2, unique=True))
    )
    meta = (
        draw(st.dictionaries(NAMES, st.one_of(st.integers(), st.booleans(), NAMES), max_size=2)) if depth == 2 else {}
    )
    return Program(inputs, outputs, nodes, constants, weights, {}, meta)


def are_equal(one, other) -> bool:
    """Whether attributes, constants and programs are equal, NaN and types of elements included."""
    if isinstance(one, Program):
        fields = ("inputs", "outputs", "weights", "layers", "metadata")
        return (
            all(getattr(one, field) == getattr(other, field) for field in fields)
            and are_equal(one.constants, other.constants)
            and len(one.nodes) == len(other.nodes)
            and all(map(are_equal, one.nodes, other.nodes))
        )
    if isinstance(one, Node):
        parts = (one.op, one.inputs, one.outputs, one.name) == (other.op, other.inputs, other.outputs, other.name)
        return parts and are_equal(dict(one.attrs), dict(other.attrs))
    if isinstance(one, dict):
        return list(one) == list(other) and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, np.ndarray):
        return (
            one.dtype.kind == other.dtype.kind
            and (one.dtype.kind == "U" or one.dtype == other.dtype)
            and one.shape == other.shape
            and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
            and (
                one.dtype.kind != "f"
                or np.array_equal(np.signbit(one) & (one == one), np.signbit(other) & (one == one))
            )
        )
    if isinstance(one, float):
        return type(other) is float and (one == other or (one != one and other != other))
    return type(one) is type(other) and one == other


@pytest.mark.slow
@settings(
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_a_program_survives_its_json(program):
    program.validate()
    text = json.dumps(program_to_json(program), allow_nan=False)
    assert are_equal(program, program_from_json(json.loads(text)))


def test_a_saved_file_has_a_node_a_line(tmp_path):
    program = branched()
    save_program(program, tmp_path / "program.json")
    assert are_equal(program, load_program(tmp_path / "program.json"))
    lines = (tmp_path / "program.json").read_text().splitlines()
    assert [sum(f'"op": "{op}"' in line for line in lines) for op in ("If-1", "Identity-1")] == [1, 1]


def small_program() -> Program:
    """Returns x [2] → x + c, with a weight that no node reads."""
    return Program(
        inputs=(Value("x", "float32", (2,)),),
        outputs=(Value("z", "float32", (2,)),),
        nodes=[Node("Add-7", ("x", "c"), ("y",)), Node("Identity-1", ("y",), ("z",), name="last")],
        constants={"c": np.array([1.0, 2.0], np.float32)},
        weights={"w": WeightInfo("float32", (2,))},
    )


def branched() -> Program:
    """Returns an If on a constant whose branches read the values around them."""

    def branch(op: str, result: str) -> Program:
        return Program((), (Value(result, "float32", None),), [Node(op, ("x", "c"), (result,))])

    attrs = {"then_branch": branch("Add-7", "t"), "else_branch": branch("Mul-7", "e")}
    nodes = [Node("If-1", ("flag",), ("y",), attrs), Node("Identity-1", ("y",), ("z",))]
    constants = {"flag": np.array(True), "c": np.array(3.0, np.float32)}
    return Program((Value("x", "float32", (2,)),), (Value("z", "float32", (2,)),), nodes, constants)


def test_the_inputs_of_a_node_include_those_of_its_branches():
    program = branched()
    node = program.nodes[0]
    assert sorted(set(node.all_inputs())) == ["c", "flag", "x"]
    assert program.consumers()["x"] == [node]
    assert [one.op for one in program.all_nodes()] == ["If-1", "Add-7", "Mul-7", "Identity-1"]


def test_select_outputs_keeps_what_the_outputs_need():
    program = small_program()
    program.nodes.append(Node("Mul-7", ("x", "w"), ("other",)))
    program = replace(program, outputs=(*program.outputs, Value("other", "float32", (2,))))
    assert set(program.select_outputs(["other"]).weights) == {"w"}
    assert not program.select_outputs(["other"]).constants
    kept = program.select_outputs(["z"])
    assert [node.op for node in kept.nodes] == ["Add-7", "Identity-1"]
    assert not kept.weights
    kept.validate()


def test_select_outputs_keeps_the_weights_of_a_layer_that_is_read():
    layered = Program(
        (Value("x", "float32", (2,)),), (Value("y", "float32", None),), [Node("mlx.linear", ("x", "a.b"), ("y",))],
        weights={"a.b.weight": WeightInfo("float32", (2, 2)), "a.bc.weight": WeightInfo("float32", (2, 2))},
        layers={"a.b": {"kind": "Linear"}, "a.bc": {"kind": "Linear"}},
    )  # fmt: skip
    kept = layered.select_outputs(["y"])
    assert set(kept.weights) == {"a.b.weight"}
    assert set(kept.layers) == {"a.b"}


BROKEN = {
    "an input's type": (lambda p: replace(p, inputs=(Value("x", "float23", (2,)),)), "'float23' of input 'x'"),
    "an input given twice": (lambda p: replace(p, inputs=p.inputs * 2), "'x' defined again by an input"),
    "a constant named as an input": (lambda p: replace(p, constants={**p.constants, "x": np.zeros(2)}), "'x' defined again by a constant"),
    "a weight named as a constant": (lambda p: replace(p, weights={"c": WeightInfo("float32", (2,))}), "'c' defined again by a weight"),
    "a layer named as a weight": (lambda p: replace(p, layers={"w": {"kind": "Linear"}}), "'w' defined again by a layer"),
    "a value given by two nodes": (lambda p: replace(p, nodes=[*p.nodes, Node("Neg-6", ("x",), ("y",))]), "'y' defined again by node Neg-6 -> y"),
    "a node before what it reads": (lambda p: replace(p, nodes=p.nodes[::-1]), "node Identity-1 'last' reading 'y'"),
    "a node reading itself": (lambda p: replace(p, nodes=[Node("Add-7", ("x", "y"), ("y",)), p.nodes[1]]), "reading 'y'"),
    "an output that nothing gives": (lambda p: replace(p, nodes=p.nodes[:1]), "no node that computes the output 'z'"),
    "an output that is a layer": (
        lambda p: replace(p, layers={"l": {"kind": "Linear"}}, outputs=(Value("l", "float32", None),)), "no node that computes the output 'l'"
    ),
    "an operator that is not declared": (lambda p: replace(p, nodes=[replace(p.nodes[0], op="Sum-99"), p.nodes[1]]), "operator 'Sum-99'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_malformed_program_is_refused(what):
    broken, actual = BROKEN[what]
    with pytest.raises(ProgramError) as error:
        broken(small_program()).validate("here", is_known_operator={"Add-7", "Identity-1", "Neg-6"}.__contains__)
    assert error.value.where == "here"
    assert actual in error.value.found
    assert error.value.expected
    assert error.value.do


def test_a_branch_is_validated_with_the_values_around_it():
    program = branched()
    program.validate()
    then = program.nodes[0].attrs["then_branch"]
    for wrong, actual in [
        (replace(then, nodes=[Node("Add-7", ("x", "nothing"), ("t",))]), "reading 'nothing'"),
        (replace(then, nodes=[Node("Add-7", ("x", "z"), ("t",))]), "reading 'z'"),  # given after the If
        (replace(then, nodes=[Node("Add-7", ("x", "c"), ("x",))], outputs=()), "'x' defined again"),
        (replace(then, weights={"w": WeightInfo("float32", ())}), "weights inside a branch"),
        (replace(then, layers={"w": {"kind": "Linear"}}), "weights inside a branch"),
    ]:
        node = replace(program.nodes[0], attrs={**program.nodes[0].attrs, "then_branch": wrong})
        with pytest.raises(ProgramError) as error:
            replace(program, nodes=[node, program.nodes[1]]).validate()
        assert actual in error.value.found


def tree() -> dict:
    return json.loads(json.dumps(program_to_json(small_program())))


def set_at(data, path, value):
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


def node_with(attr):
    return [{"op": "Add-7", "inputs": ["x", "c"], "outputs": ["z"], "attrs": {"a": attr}}]


def array_of(dtype, shape, data):
    return {"dtype": dtype, "shape": shape, "data": data}


HOSTILE = [
    ((), []), ((), None), ((), 5), ((), "program"),
    (("format",), "onnx"), (("format",), None), (("version",), PROGRAM_VERSION + 1), (("version",), str(PROGRAM_VERSION)), (("version",), None),
    (("inputs",), None), (("inputs",), "x"), (("inputs",), {"x": 1}), (("inputs", 0), []), (("inputs", 0), "x"),
    (("inputs", 0, "name"), ""), (("inputs", 0, "name"), 3), (("inputs", 0, "name"), ["x"]), (("inputs", 0, "dtype"), "float23"),
    (("inputs", 0, "dtype"), ["float32"]), (("inputs", 0, "shape"), 2), (("inputs", 0, "shape"), [-1]), (("inputs", 0, "shape"), [2**48]),
    (("inputs", 0, "shape"), [True]), (("inputs", 0, "shape"), [1.0]), (("inputs", 0, "shape"), [[2]]), (("inputs", 0, "shape"), {"2": 2}),
    (("outputs",), 3), (("outputs", 0, "dtype"), None),
    (("nodes",), None), (("nodes",), "Add"), (("nodes", 0), None), (("nodes", 0), ["Add-7"]), (("nodes", 0, "op"), 7),
    (("nodes", 0, "op"), ""), (("nodes", 0, "inputs"), "x"), (("nodes", 0, "inputs"), [3]), (("nodes", 0, "inputs"), None),
    (("nodes", 0, "outputs"), {"y": 1}), (("nodes", 0, "attrs"), []), (("nodes", 0, "attrs"), None), (("nodes", 0, "attrs"), {"": 1}),
    (("nodes",), node_with({})), (("nodes",), node_with({"what": 1})), (("nodes",), node_with({"float": 1.0})),
    (("nodes",), node_with({"float": "1"})), (("nodes",), node_with({"float": "inf", "array": 1})), (("nodes",), node_with({"array": 1})),
    (("nodes",), node_with({"program": {}})), (("nodes",), node_with({"program": []})), (("nodes",), node_with([{"float": []}])),
    (("weights",), []), (("weights",), "w"), (("weights", "w"), None), (("weights", "w"), []), (("weights", "w", "dtype"), "f4"),
    (("weights", "w", "shape"), ["2"]), (("weights", "w", "shape"), [-2]), (("weights", "w", "shape"), [2**60]),
    (("weights", "w", "shape"), [2.0]), (("weights", ""), {"dtype": "float32", "shape": []}),
    (("layers",), []), (("layers",), {"a": "b"}), (("layers",), {"a": 1}), (("layers",), {"a": None}), (("layers",), {"": {}}),
    (("meta",), None), (("meta",), 3), (("meta",), "ab"),
    (("constants",), []), (("constants",), {"": array_of("int8", [], [1])}), (("constants", "c"), 1.0), (("constants", "c"), [1.0]),
    (("constants", "c"), array_of("object", [1], [1])), (("constants", "c"), array_of("float128", [1], [1.0])),
    (("constants", "c"), array_of("U500000000", [1], ["x"])), (("constants", "c"), array_of("S9", [1], ["x"])),
    (("constants", "c"), array_of("(500000000,)f4", [1], [1.0])), (("constants", "c"), array_of("f4,f4", [1], [1.0])),
    (("constants", "c"), array_of(4, [1], [1.0])), (("constants", "c"), array_of(["int8"], [1], [1])),
    (("constants", "c"), array_of("int8", [2**40], [])), (("constants", "c"), array_of("int8", [0, 2**47, 2**47], [])),
    (("constants", "c"), array_of("int8", [2**47] * 4, [1])), (("constants", "c"), array_of("int8", [1] * 100, [1])),
    (("constants", "c"), array_of("int8", [2], [1])), (("constants", "c"), array_of("int8", [-1], [1])),
    (("constants", "c"), array_of("int8", [1], [300])), (("constants", "c"), array_of("int8", [1], ["3"])),
    (("constants", "c"), array_of("int8", [1], [1.5])), (("constants", "c"), array_of("int8", [1], [True])),
    (("constants", "c"), array_of("int8", [1], [None])), (("constants", "c"), array_of("int64", [1], [2**70])),
    (("constants", "c"), array_of("uint8", [1], [-1])), (("constants", "c"), array_of("float32", [1], ["1.5"])),
    (("constants", "c"), array_of("float32", [1], [None])), (("constants", "c"), array_of("float32", [1], [[1.0]])),
    (("constants", "c"), array_of("float32", [1], "5")), (("constants", "c"), array_of("float32", [1], {"5": 1})),
    (("constants", "c"), array_of("bool", [1], [1])), (("constants", "c"), array_of("bool", [1], ["no"])),
    (("constants", "c"), array_of("str", [1], [5])),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), HOSTILE, ids=lambda part: None)
def test_hostile_json_is_refused(path, value, tmp_path):
    data = tree()
    if path:
        set_at(data, path, value)
    else:
        data = value
    (tmp_path / "program.json").write_text(json.dumps(data))
    with pytest.raises(ProgramError) as error:
        load_program(tmp_path / "program.json")
    assert error.value.where == str(tmp_path / "program.json")


def test_the_json_that_the_hostile_cases_change_is_valid():
    assert are_equal(small_program(), program_from_json(tree()))
    assert are_equal(
        np.array([np.inf]),
        program_from_json({**tree(), "constants": {"c": array_of("float64", [1], ["inf"])}}).constants["c"],
    )


@pytest.mark.parametrize("key", ["inputs", "outputs", "nodes", "constants", "weights", "layers", "meta"])
def test_a_missing_key_is_refused(key):
    data = tree()
    del data[key]
    with pytest.raises(ProgramError, match=key):
        program_from_json(data)


def nested(kind: str, depth: int) -> str:
    """Returns the JSON of a program whose attribute is `depth` deep: lists, or programs in programs."""
    empty = f'"format": "{PROGRAM_FORMAT}", "version": {PROGRAM_VERSION}, "meta": {{}}, "inputs": [], "outputs": [], "layers": {{}}'
    head = f'{{{empty}, "weights": {{}}, "constants": {{}}, "nodes": [{{"op": "If-1", "inputs": [], "outputs": [], "attrs": {{"a": '
    tail = "}}]}"
    if kind == "lists":
        return head + "[" * depth + "]" * depth + tail
    return (head + '{"program": ') * depth + "1" + ("}" + tail) * depth


@pytest.mark.parametrize("kind", ["lists", "programs"])
@pytest.mark.parametrize("depth", [990, 10**5])
def test_deep_nesting_is_refused(kind, depth, tmp_path):
    (tmp_path / "program.json").write_text(nested(kind, depth))
    with pytest.raises(ProgramError):
        load_program(tmp_path / "program.json")


def test_shallow_nesting_is_read(tmp_path):
    (tmp_path / "program.json").write_text(nested("lists", 50))
    assert load_program(tmp_path / "program.json").nodes[0].op == "If-1"


@pytest.mark.parametrize(
    "text", [b"", b"\0" * 40, b"{", b"[1, 2", b'{"format": "\xff"}', b"\x80\x81", b"1" * 5000, b"NaN"]
)
def test_a_file_without_json_is_refused(text, tmp_path):
    (tmp_path / "program.json").write_bytes(text)
    with pytest.raises(ProgramError):
        load_program(tmp_path / "program.json")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    with open(tmp_path / "program.json", "wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(ProgramError, match="bytes"):
        load_program(tmp_path / "program.json")


def test_a_value_that_json_cannot_hold_is_not_written(tmp_path):
    program = small_program()
    program.metadata["error"] = float("inf")
    with pytest.raises(ValueError, match="JSON"):
        save_program(program, tmp_path / "program.json")
    assert not (tmp_path / "program.json").exists()


# Metadata.


RECORD = {
    "trained_length": 256,
    "branch": "cached",
    "attention_windows": [0, 8],
    "source": {"file": "model.onnx"},
    "nodes": {"read": 9, "kept": 3},
    "proof": {"error": 1e-7, "limit": 1e-4, "tried": {"append": 1e-7}, "prompts": [5, 0], "steps": 2},
    "rewrites": [{"name": "fuse_norms", "held": 2, "declined": {"a reason": 1}}],
    "float_activations": {"held": 3, "declined": {}, "error": 0.1, "divergence": 0},
    "cast": {"dtype": "float16", "error": 1e-3, "limit": 3e-2},
}


def test_metadata_are_read_with_a_type():
    metadata = Metadata(RECORD)
    assert (metadata.trained_length, metadata.branch, metadata.attention_windows) == (256, "cached", (0, 8))
    assert metadata.source == SourceFile("model.onnx", "")
    assert metadata.nodes == NodeCounts(9, 3)
    assert metadata.proof is not None
    assert metadata.proof.tried == {"append": 1e-7}
    assert metadata.rewrites == [RewriteSummary("fuse_norms", 2, {"a reason": 1})]
    assert metadata.float_activations is not None
    assert metadata.float_activations.replaced == 3
    assert metadata.cast is not None
    assert metadata.cast.dtype == "float16"
    assert metadata.quantization is None


@pytest.mark.parametrize("value", [None, "x", -1, [None], {"held": "many"}, {"file": 3}, True])
def test_malformed_metadata_are_none_and_are_saved_unchanged(value):
    malformed = dict.fromkeys((*RECORD, "quantization", "unknown"), value)
    metadata = Metadata(malformed)
    assert (metadata.source, metadata.nodes, metadata.proof, metadata.rewrites) == (None, None, None, [])
    assert (metadata.float_activations, metadata.cast, metadata.quantization) == (None, None, None)
    assert metadata.attention_windows is None
    program = replace(small_program(), metadata=malformed)
    assert program_from_json(program_to_json(program)).metadata == malformed
