"""What rewrites share: the graph view, patterns, subgraphs, slices, sets of operators, layers, the node builder."""

from __future__ import annotations

import importlib
import pkgutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter import converters
from mlx_transmuter.converters.graph.graph_view import GraphView, is_op_type
from mlx_transmuter.converters.graph.layer_view import LayerView, name_arrays
from mlx_transmuter.converters.graph.node_builder import NodeBuilder
from mlx_transmuter.converters.graph.patterns import (
    AnyOf,
    ConstantScalar,
    ConstantVector,
    Op,
    OptionalOp,
    Var,
    match_pattern,
)
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.graph.slices import Slice, slice_of, sliced_axis, split_sizes
from mlx_transmuter.converters.graph.subgraph import Subgraph, evaluate_nodes, evaluate_outputs
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.ops import OPERATORS
from mlx_transmuter.program import Node, Program, Value, WeightInfo
from mlx_transmuter.program.layer_arrays import array_owner


def graph_of(*nodes: Node, **constants) -> GraphView:
    arrays = {name: np.array(value) for name, value in constants.items()}
    return GraphView(Program((Value("x", "float32", None),), (), list(nodes), arrays))


def probe_of(*shape: int) -> ShapeProbe:
    """A probe that knows the shape of x alone."""
    values = ({"x": np.zeros(shape, np.float32)},)
    return ShapeProbe(None, (), values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "op_type"),
    [("Expand-13", "Expand"), ("com.microsoft.Gelu-1", "com.microsoft.Gelu"), ("mlx.linear", "mlx.linear")],
)
def test_an_op_type_is_the_operator_without_its_version(op, op_type):
    node = Node(op, (), ())
    assert is_op_type(node, op_type)
    assert is_op_type(node, "Other", op_type)
    assert not is_op_type(node, "Other")
    assert not is_op_type(node)


def test_a_scalar_is_a_constant_of_one_element():
    graph = graph_of(a=3, b=[[1.5]], c=[1, 2], d=True, e="text")
    assert graph.scalar("a") == 3
    assert graph.scalar("b") == 1.5
    assert graph.scalar("d") is True
    assert [graph.scalar(name) for name in ("c", "e", "x", "")] == [None] * 4


def test_positions_follow_the_order_of_the_nodes():
    nodes = [Node("Neg-6", (x,), (y,)) for x, y in ("xa", "ab", "bc")]
    graph = graph_of(*nodes)
    assert [graph.position(node) for node in nodes] == [0, 1, 2]
    assert graph.in_order(nodes[::-1]) == nodes


def slice_node(*inputs: str) -> Node:
    return Node("Slice-13", ("x", *inputs), ("y",))


SLICED = {"b": 1, "e": [-1], "a": [-1], "s": [2], "two": [1, 2]}


def test_a_slice_of_one_axis():
    node = slice_node("b", "e", "a", "s")
    graph = graph_of(node, **SLICED)
    assert slice_of(graph, None, node) == Slice(-1, 1, -1, 2)  # of a value of unknown rank
    assert slice_of(graph, probe_of(2, 3, 10), node) == Slice(2, 1, -1, 2)
    assert slice_of(graph, None, slice_node("b", "e", "a")) == Slice(-1, 1, -1, 1)
    assert Slice(2, 1, -1, 2).indices(10) == (1, 9, 2)
    assert Slice(0, -3, 2**40).indices(10) == (7, 10, 1)


@pytest.mark.parametrize(
    "node",
    [
        slice_node("b", "e"),
        slice_node("b", "e", "two", "s"),
        slice_node("b", "x", "a", "s"),
        slice_node("b", "e", "a", ""),
        Node("Neg-6", ("x",), ("y",)),
    ],
    ids=str,
)
def test_what_is_no_constant_slice_of_one_axis(node):
    assert slice_of(graph_of(node, **SLICED), None, node) is None


def test_the_axis_of_a_slice_whose_ends_are_not_constant():
    graph, probe = graph_of(**SLICED), probe_of(2, 3, 10)
    assert sliced_axis(graph, probe, slice_node("x", "x", "a")) == 2
    assert sliced_axis(graph, None, slice_node("x", "x", "a")) == -1
    assert sliced_axis(graph, probe, Node("Split-13", ("x",), ("y", "z"), {"axis": -2})) == 1
    assert sliced_axis(graph, probe, Node("Split-13", ("x",), ("y", "z"))) == 0
    assert sliced_axis(graph, probe, slice_node("x", "x", "two")) is None
    assert sliced_axis(graph, probe, Node("Neg-6", ("x",), ("y",))) is None


def chain() -> GraphView:
    """x → Neg → a → Exp → b, Shape(x) → s, Add(b, one) → c, Reshape(c, s) → y."""
    nodes = [
        Node("Neg-6", ("x",), ("a",)),
        Node("Exp-6", ("a",), ("b",)),
        Node("Shape-1", ("x",), ("s",)),
        Node("Add-7", ("b", "one"), ("c",)),
        Node("Reshape-5", ("c", "s"), ("y",)),
    ]
    return graph_of(*nodes, one=np.float32(1))


def test_a_subgraph_computes_its_output_from_the_values_of_its_boundary():
    graph, step_values = chain(), {"s": np.array([2, 1])}
    subgraph = Subgraph.collect(graph, step_values, "y", {"a"}, max_nodes=3)
    assert subgraph is not None
    assert [node.op_type for node in subgraph.nodes] == ["Exp", "Add", "Reshape"]
    assert list(subgraph.shapes) == ["s"]
    value = subgraph.evaluate({"a": mx.array([0.0, 1.0])})
    assert value is not None
    np.testing.assert_allclose(np.array(value), np.exp([[0.0], [1.0]]) + 1, rtol=1e-6)
    assert subgraph.evaluate({"a": mx.zeros((3,))}) is None  # which has no shape [2, 1]


def test_a_subgraph_that_is_too_large_or_reads_other_values_is_none():
    graph, step_values = chain(), {"s": np.array([2, 1])}
    assert Subgraph.collect(graph, step_values, "y", {"a"}, max_nodes=2) is None
    assert Subgraph.collect(graph, step_values, "y", {"elsewhere"}, max_nodes=9) is None
    assert Subgraph.collect(graph, {}, "y", {"a"}, max_nodes=9) is None


def test_a_chain_of_nodes_is_computed_in_order():
    nodes = chain().nodes[:2]
    values = evaluate_nodes(nodes, {"x": np.array([0.0, -1.0], np.float32)})
    np.testing.assert_allclose(values["b"], np.exp([0.0, 1.0]), rtol=1e-6)


def test_outputs_of_a_part_of_a_program():
    graph = chain()
    values = evaluate_outputs(graph.program, {"x": mx.array([0.0, -1.0])}, ["b", "a"])
    assert list(values) == ["b", "a"]
    np.testing.assert_allclose(np.array(values["b"]), np.exp([0.0, 1.0]), rtol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "bindings"),
    [
        (Op("Add", ConstantScalar("one", 1.0), Op("Exp", Var("a"))), {"one": "one", "a": "a"}),  # in either order
        (Op("Add", Op("Exp", OptionalOp("Neg", Var("x")), name="b"), ConstantScalar()), {"b": "b", "x": "a"}),
        (Op("Add", Op("Exp", Op("Neg", Var("x"))), Var("x")), None),  # two values of one name
        (Op("Add", AnyOf(Op("Neg", Var("z")), Op("Exp", Var("z"))), Var("c")), {"z": "a", "c": "one"}),
        (Op("Add", Var("b"), ConstantScalar("", 2.0)), None),
        (Op("Add", Var("b"), ConstantVector("w")), None),
        (Op("Sub", Var("b"), Var("c")), None),
    ],
    ids=str,
)
def test_a_pattern_binds_values(pattern, bindings):
    graph = chain()
    (add,) = (node for node in graph.nodes if node.op_type == "Add")
    assert match_pattern(graph, add, pattern) == bindings


def test_a_constant_vector_is_a_constant_or_a_weight_of_one_long_axis():
    nodes = [Node("Mul-7", ("x", name), (f"{name}y",)) for name in ("row", "column", "scalar", "weight")]
    graph = graph_of(*nodes, row=[[1.0, 2.0]], column=[[1.0], [2.0]], scalar=[1.0])
    weight = LazyTensor("float32", (1, 1, 3), lambda: np.zeros((1, 1, 3), np.float32))
    graph = GraphView(graph.program.with_tensors({"weight": weight}))
    pattern = Op("Mul", Var("x"), ConstantVector("w"))
    matches = [match_pattern(graph, node, pattern) for node in graph.nodes]
    assert matches == [{"x": "x", "w": "row"}, None, None, {"x": "x", "w": "weight"}]


def test_the_sizes_of_a_split():
    graph = graph_of(**SLICED)
    assert split_sizes(graph, Node("Split-13", ("x", "two"), ("y", "z"))) == [1, 2]
    assert split_sizes(graph, Node("Split-2", ("x",), ("y", "z"), {"split": [3, 4]})) == [3, 4]
    assert split_sizes(graph, Node("Split-13", ("x",), ("y", "z"))) is None
    assert split_sizes(graph, Node("Split-13", ("x", "x"), ("y", "z"))) is None
    assert split_sizes(graph, slice_node("b", "e", "a")) is None


def test_the_arrays_of_a_layer():
    tensor = LazyTensor("float32", (2, 2), lambda: np.zeros((2, 2), np.float32))
    names = ("a.b.weight", "a.b.bias", "a.bc.weight", "a.loose")
    layers = {"a.b": {"kind": "Linear"}, "a.bc": {"kind": "Embedding"}}
    program = Program((), (), [], layers=layers).with_tensors(dict.fromkeys(names, tensor))
    assert program.weights["a.b.weight"] == WeightInfo("float32", (2, 2))
    view = LayerView(program)
    assert view.arrays("a.b") == {"weight": tensor, "bias": tensor}
    assert name_arrays("q", {"weight": tensor}) == {"q.weight": tensor}
    assert array_owner("a.bc.weight", layers) == ("a.bc", "weight")
    assert array_owner("a.loose", layers) is None
    assert view.free_path("a.b", "_2") == "a.b_2"
    assert view.free_path("a.loose", "_2") == "a.loose_2"
    assert view.free_path("a.new", "_2") == "a.new"
    assert view.free_path("a.loose", "_2", removed=["a.loose"]) == "a.loose"
    assert view.free_path("a.new", "_2", added=["a.new.weight"]) == "a.new_2"


def test_the_node_builder_names_what_it_adds_after_its_prefix():
    builder = NodeBuilder("y")
    assert builder.add_cast("x", "float16", "half") == "y.half"
    assert builder.add_split("y.half", [1, 2], ("a", "b")) == ["y.a", "y.b"]
    assert builder.add_split_heads("y.b", 4, "heads") == "y.heads"
    assert [node.op_type for node in builder.nodes] == ["Cast", "Split", "Reshape", "Transpose"]
    assert {name: array.tolist() for name, array in builder.constants.items()} == {
        "y.a.sizes": [1, 2], "y.heads.shape": [0, 0, 4, -1],
    }  # fmt: skip
    assert all(node.op in OPERATORS for node in builder.nodes)


def test_every_operator_of_a_set_is_declared():
    """A misspelled operator would never match, and nothing else would say so."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(converters.__path__, converters.__name__ + ".")
    ]
    sets = {
        f"{module.__name__}.{name}": set(value)
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_OPS")
    }
    assert len(sets) > 40
    op_types = {Node(name, (), ()).op_type for name in OPERATORS}
    assert {name: value - op_types for name, value in sets.items() if value - op_types} == {}
