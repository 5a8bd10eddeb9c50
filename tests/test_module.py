"""ProgramModule: host and device values, names of weights, MLX's tools on it, and what it refuses."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_transmuter.ops import OperatorError
from mlx_transmuter.program import Node, Program, ProgramError, Value, WeightInfo
from mlx_transmuter.runtime.module import ProgramModule, trace_values
from mlx_transmuter.runtime.program_walk import MAX_HOST_ELEMENTS, evaluate_node

X = Value("x", "float32", ("rows", 6))


def program(nodes, *, outputs=("y",), inputs=(X,), constants=None, **more) -> Program:
    values = tuple(Value(name, "float32", None) for name in outputs)
    return Program(tuple(inputs), values, nodes, constants or {}, **more)


def primitives(function, *arrays) -> list[str]:
    """Returns the names of the operations that a compiled `function` would run."""
    actual: list[str] = []
    mx.export_function(
        lambda part: actual.append(part["name"]) if part["type"] == "primitive" else None, function, *arrays
    )
    return actual


def host_values(module: ProgramModule, **inputs) -> dict[str, np.ndarray]:
    return {name: value for name, value in trace_values(module, **inputs).items() if isinstance(value, np.ndarray)}


def ints(*values):
    return np.array(values, np.int64)


# Shape → Gather → Mul → Concat → Reshape, as exporters write x.reshape(x.shape[0] * 2, -1); Range → Cast → Add beside
# it.
CHAIN = [
    Node("Shape-1", ("x",), ("shape",)),
    Node("Gather-1", ("shape", "zero"), ("rows",)),
    Node("Mul-7", ("rows", "two"), ("twice",)),
    Node("Unsqueeze-13", ("twice", "axis"), ("twice1",)),
    Node("Concat-4", ("twice1", "rest"), ("target",), {"axis": 0}),
    Node("Reshape-5", ("x", "target"), ("y",)),
]
CHAIN_CONSTANTS = {"zero": np.array(0, np.int64), "two": np.array(2, np.int64), "axis": ints(0), "rest": ints(-1)}


def test_values_that_follow_from_shapes_leave_no_operation_in_a_step():
    module = ProgramModule(program(CHAIN, constants=CHAIN_CONSTANTS), {})
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    assert np.array_equal(module(x=x)["y"], np.arange(24).reshape(8, 3))
    assert primitives(lambda x: module(x=x)["y"], x) == primitives(lambda x: x.reshape(8, 3), x)


def test_values_on_the_host_are_those_that_follow_from_shapes():
    module = ProgramModule(program(CHAIN, constants=CHAIN_CONSTANTS), {})
    actual = host_values(module, x=mx.zeros((4, 6)))
    assert {name: value.tolist() for name, value in actual.items() if name not in CHAIN_CONSTANTS} == {
        "shape": [4, 6], "rows": 4, "twice": 8, "twice1": [8], "target": [8, -1],
    }  # fmt: skip


def test_a_numpy_input_is_on_the_host():
    nodes = [Node("Add-7", ("n", "n"), ("twice",)), Node("Expand-8", ("x", "twice"), ("y",))]
    module = ProgramModule(program(nodes, inputs=(X, Value("n", "int64", (2,)))), {})
    assert module(x=mx.ones((1, 1)), n=ints(1, 3))["y"].shape == (2, 6)
    with pytest.raises(OperatorError) as error:
        module(x=mx.ones((1, 1)), n=mx.array([1, 3]))
    assert "shape ('twice') depending on values that are known only when the step runs" in error.value.found
    assert error.value.node == "Expand-8 -> y"


def test_an_error_names_node_and_value_where_a_shape_depends_on_the_device():
    nodes = [
        Node("Cast-9", ("x",), ("n",), {"to": 7}, name="/model/Cast"),
        Node("Reshape-5", ("x", "n"), ("y",), name="/model/Reshape"),
    ]
    with pytest.raises(OperatorError) as error:
        ProgramModule(program(nodes), {})(x=mx.ones((1, 6)))
    assert error.value.node == "Reshape-5 '/model/Reshape'"
    assert "'n'" in error.value.found
    assert error.value.expected
    assert error.value.do


def test_a_large_value_of_constants_is_on_the_device():
    nodes = [Node("ConstantOfShape-9", ("size",), ("big",)), Node("Add-7", ("x", "big"), ("y",))]
    many = MAX_HOST_ELEMENTS + 1
    module = ProgramModule(program(nodes, constants={"size": ints(many)}), {})
    assert "big" not in host_values(module, x=mx.zeros((many,)))
    assert module(x=mx.ones((many,)))["y"].sum().item() == many


def branch(op: str, *reads: str) -> Program:
    result = f"{op} of {' '.join(reads)}"
    return Program((), (Value(result, "float32", None),), [Node(op, reads, (result,))])


def conditional(condition: Node, **more) -> Program:
    attrs = {"then_branch": branch("Add-7", "x", "c"), "else_branch": branch("Mul-7", "x", "c")}
    constants = {"c": np.array(3.0, np.float32), "four": np.array(4, np.int64), **more}
    return program([condition, Node("If-1", ("flag",), ("y",), attrs, name="/cond/If")], constants=constants)


def test_a_branch_on_a_host_value_is_taken_while_tracing():
    nodes = [Node("Size-1", ("x",), ("n",)), Node("Less-9", ("n", "four"), ("flag",))]
    program_ = conditional(nodes[1])
    program_.nodes.insert(0, nodes[0])
    module = ProgramModule(program_, {})
    small, large = mx.full((3,), 2.0), mx.full((5,), 2.0)
    assert module(x=small)["y"].tolist() == [5.0] * 3
    assert module(x=large)["y"].tolist() == [6.0] * 5
    ran = primitives(lambda x: module(x=x)["y"], small)
    assert "Add" in ran
    assert "Multiply" not in ran


def test_if_on_a_device_value_is_an_error_that_names_both():
    flag = Node("IsNaN-9", ("x",), ("flag",))
    with pytest.raises(OperatorError) as error:
        ProgramModule(conditional(flag), {})(x=mx.array(1.0))
    assert error.value.node == "If-1 '/cond/If'"
    assert "'flag'" in error.value.found


def test_an_error_inside_a_branch_names_the_inner_node():
    attrs = {"then_branch": branch("MatMul-1", "x", "x"), "else_branch": branch("Mul-7", "x", "x")}
    nodes = [Node("If-1", ("flag",), ("y",), attrs, name="outer")]
    with pytest.raises(OperatorError) as error:
        ProgramModule(program(nodes, constants={"flag": np.array(True)}), {})(x=mx.ones((2, 3)))
    assert error.value.node == "MatMul-1 -> MatMul-1 of x x"


def linears() -> ProgramModule:
    """Returns a module of two projections, a table and a weight of no layer, in the scopes of exporters."""
    q, k = (f"model.layers.{i}.self_attn.q_proj" for i in range(2))
    nodes = [
        Node("mlx.embedding", ("ids", "model.embed_tokens"), ("e",)),
        Node("mlx.linear", ("e", q), ("h",)),
        Node("mlx.linear", ("h", k), ("g",)),
        Node("Mul-7", ("g", "model.norm.weight"), ("n",)),
        Node("mlx.as_linear", ("n", "model.embed_tokens"), ("y",)),
    ]
    shapes = {
        "model.embed_tokens.weight": (40, 64), f"{q}.weight": (64, 64), f"{q}.bias": (64,), f"{k}.weight": (64, 64), "model.norm.weight": (64,)
    }  # fmt: skip
    layers = {
        q: {"kind": "Linear", "bias": True}, k: {"kind": "Linear", "bias": False}, "model.embed_tokens": {"kind": "Embedding"}
    }  # fmt: skip
    weights = {name: WeightInfo("float32", shape) for name, shape in shapes.items()}
    draw = np.random.default_rng(0)
    arrays = {name: mx.array(draw.normal(size=shape).astype(np.float32)) / 8 for name, shape in shapes.items()}
    inputs = (Value("ids", "int64", ("rows", "seq")),)
    return ProgramModule(program(nodes, inputs=inputs, weights=weights, layers=layers), arrays)


IDS = mx.array([[3, 7, 39]])


def reference(weights: dict[str, np.ndarray]) -> np.ndarray:
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    h = w["model.embed_tokens.weight"][np.array(IDS)]
    for i in range(2):
        name = f"model.layers.{i}.self_attn.q_proj"
        h = h @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)
    return h * w["model.norm.weight"] @ w["model.embed_tokens.weight"].T


def test_weights_have_the_names_of_their_scopes():
    module = linears()
    names = [name for name, _ in tree_flatten(module.parameters())]
    assert sorted(names) == sorted(module.program.weights)
    assert isinstance(module["model"]["layers"], list)
    assert type(module["model"]["layers"][1]["self_attn"]["q_proj"]) is nn.Linear
    assert type(module["model"]["embed_tokens"]) is nn.Embedding
    np.testing.assert_allclose(module(ids=IDS)["y"], reference(module.weights()), atol=1e-4)


def test_update_changes_what_the_module_computes():
    module = linears()
    module.update(tree_map(lambda array: array * 2, module.parameters()))
    np.testing.assert_allclose(module(ids=IDS)["y"], reference(module.weights()), atol=1e-3)
    doubled = {name: array / 2 for name, array in module.weights().items()}
    assert {name: array.tolist() for name, array in doubled.items()} == {
        name: array.tolist() for name, array in linears().weights().items()
    }


def test_nn_quantize_swaps_the_layers_that_run():
    module = linears()
    plain = np.array(module(ids=IDS)["y"])
    nn.quantize(module, group_size=32, bits=8)
    assert type(module["model"]["layers"][0]["self_attn"]["q_proj"]) is nn.QuantizedLinear
    assert type(module["model"]["embed_tokens"]) is nn.QuantizedEmbedding
    actual = np.array(module(ids=IDS)["y"])
    assert not np.array_equal(actual, plain)
    np.testing.assert_allclose(actual, plain, atol=0.02 * np.ptp(plain))
    assert "QuantizedMatmul" in primitives(lambda ids: module(ids=ids)["y"], IDS[:, :1])


def test_a_swapped_layer_is_the_one_that_runs():
    module = linears()

    class Zero(nn.Module):
        def __call__(self, x):
            return mx.zeros_like(x)

    module["model"]["layers"][1]["self_attn"]["q_proj"] = Zero()
    assert not module(ids=IDS)["y"].any()


def test_missing_and_unknown_inputs_are_named():
    module = ProgramModule(program(CHAIN, constants=CHAIN_CONSTANTS), {})
    with pytest.raises(ProgramError, match="no input x"):
        module()
    with pytest.raises(ProgramError, match="an input z"):
        module(x=mx.zeros((2, 6)), z=mx.zeros(1))


ADD = [Node("Add-7", ("x", "x"), ("y",), name="sum")]
WRONG_NODES = {
    "too few inputs": ([Node("Add-7", ("x",), ("y",), name="n")], "1 inputs"),
    "too many inputs": ([Node("Neg-6", ("x", "x"), ("y",), name="n")], "2 inputs"),
    "an unknown attribute": ([Node("Add-7", ("x", "x"), ("y",), {"sparkle": 1}, name="n")], "the attribute sparkle"),
    "too many outputs": ([Node("Add-7", ("x", "x"), ("y", "z"), name="n")], "1 results"),
    "shapes that do not fit": ([Node("MatMul-1", ("x", "x"), ("y",), name="n")], "ValueError"),
    "a division by zero": ([Node("Range-11", ("one", "one", "nought"), ("y",), name="n")], "ZeroDivisionError"),
}


@pytest.mark.parametrize("what", WRONG_NODES)
def test_a_node_that_cannot_run_is_named(what):
    nodes, actual = WRONG_NODES[what]
    constants = {"one": np.array(1, np.int64), "nought": np.array(0, np.int64)}
    with pytest.raises(OperatorError) as error:
        ProgramModule(program(nodes, constants=constants), {})(x=mx.ones((2, 3)))
    assert error.value.node.endswith("'n'")
    assert actual in error.value.found


HUGE = {
    "expanded": [Node("Expand-8", ("x", "shape"), ("y",), name="n")],
    "filled": [Node("ConstantOfShape-9", ("shape",), ("y",), name="n")],
    "tiled": [Node("Expand-8", ("x", "ones"), ("wide",)), Node("Tile-6", ("wide", "shape"), ("y",), name="n")],
    "padded": [Node("Expand-8", ("x", "ones"), ("wide",)), Node("Pad-11", ("wide", "pads"), ("y",), name="n")],
    "multiplied": [
        Node("Expand-8", ("x", "column"), ("a",)), Node("Expand-8", ("x", "row"), ("b",)), Node("MatMul-1", ("a", "b"), ("y",), name="n")
    ],
    "counted": [Node("Range-11", ("low", "high", "one"), ("y",), name="n")],
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("size", [2**30, 2**60, 2**62])
def test_a_value_larger_than_memory_is_an_error_and_is_never_computed(what, size):
    # 2^30 an axis is what MLX accepts; the number of elements then counts modulo 2^64 there and may seem small.
    constants = {
        "shape": ints(size, size, size, size), "ones": ints(1, 1, 1, 1), "pads": ints(*[size] * 8), "row": ints(1, size),
        "column": ints(size, 1), "low": np.array(0, np.int64), "high": np.array(size * (2**31 if size < 2**32 else 1), np.int64),
        "one": np.array(1, np.int64),
    }  # fmt: skip
    with pytest.raises(OperatorError) as error:
        ProgramModule(program(HUGE[what], constants=constants), {})(x=mx.ones((1,)))
    assert error.value.node


def test_a_value_that_fits_in_memory_by_its_size_is_computed():
    nodes = [Node("Expand-8", ("x", "shape"), ("wide",)), Node("ReduceMax-11", ("wide",), ("y",), {"keepdims": 0})]
    module = ProgramModule(program(nodes, constants={"shape": ints(512, 512)}), {})
    assert module(x=mx.array([3.0]))["y"].item() == 3.0


W = {"w": WeightInfo("float32", (2,))}
WRONG_WEIGHTS = {
    "missing": (W, {}, {}, "none named 'w' (1 missing)"),
    "another shape": (W, {}, {"w": mx.zeros(3)}, "[3]"),
    "another type": (W, {}, {"w": mx.zeros(2, mx.int32)}, "int32"),
    "a type that MLX lacks": ({"w": WeightInfo("float8_e5m2", (2,))}, {}, {"w": mx.zeros(2)}, "float8_e5m2"),
    "a name inside another": ({**W, "w.b": W["w"]}, {}, {"w": mx.zeros(2), "w.b": mx.zeros(2)}, "'w.b'"),
    "a name inside a layer": ({"l.a.b": W["w"], "l.weight": W["w"]}, {"l": {"kind": "Embedding"}}, {}, "'l.a.b'"),
    "a hidden name": ({"_places": W["w"]}, {}, {"_places": mx.zeros(2)}, "'_places'"),
    "a hidden part": ({"a._b.c": W["w"]}, {}, {"a._b.c": mx.zeros(2)}, "'a._b.c'"),
    "an empty part": ({"a..b": W["w"]}, {}, {"a..b": mx.zeros(2)}, "'a..b'"),
    "a name without end": ({"a" + ".a" * 10**5: W["w"]}, {}, {}, "'a.a.a"),
    "an unknown layer": ({}, {"l": {"kind": "Sequential"}}, {}, "Sequential"),
    "a layer without a kind": ({}, {"l": {}}, {}, "kind"),
    "a layer without its weight": ({}, {"l": {"kind": "Linear"}}, {}, "the weights []"),
    "a bias that the layer has not": (
        {"l.weight": WeightInfo("float32", (2, 2)), "l.bias": W["w"]}, {"l": {"kind": "Linear", "bias": False}}, {}, "l.bias"
    ),
    "bits that no layer has": ({}, {"l": {"kind": "QuantizedLinear", "bits": 7000, "group_size": 64}}, {}, "7000"),
    "a group without end": ({}, {"l": {"kind": "QuantizedLinear", "bits": 4, "group_size": 2**62}}, {}, str(2**62)),
    "a group that is text": ({}, {"l": {"kind": "QuantizedLinear", "bits": 4, "group_size": "many"}}, {}, "many"),
    "no bits": ({}, {"l": {"kind": "QuantizedEmbedding"}}, {}, "bits"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_WEIGHTS)
def test_wrong_weights_and_layers_are_refused(what):
    weights, layers, arrays, actual = WRONG_WEIGHTS[what]
    with pytest.raises(ProgramError) as error:
        ProgramModule(program(ADD, weights=weights, layers=layers), arrays)
    assert actual in str(error.value)


def test_arrays_that_the_program_does_not_name_are_left_out():
    module = ProgramModule(program(ADD, weights=W), {"w": mx.zeros(2), "stranger": mx.zeros(2)})
    assert [name for name, _ in tree_flatten(module.parameters())] == ["w"]


def test_an_operator_that_is_not_declared_is_refused_at_once():
    with pytest.raises(ProgramError, match="Sum-99"):
        ProgramModule(program([Node("Sum-99", ("x",), ("y",))]), {})


def test_evaluate_node_returns_small_values_as_numpy_and_large_ones_as_arrays():
    (small,) = evaluate_node(Node("Add-7", ("a", "b"), ("c",)), {"a": ints(1, 2), "b": ints(3, 4)})
    assert isinstance(small, np.ndarray)
    assert small.tolist() == [4, 6]
    (large,) = evaluate_node(Node("ConstantOfShape-9", ("s",), ("c",)), {"s": ints(2**14, 2**14)})
    assert isinstance(large, mx.array)
    assert math.prod(large.shape) == 2**28


def test_an_eager_walk_drops_values_after_their_last_read():
    """Peak memory of a chain of sums does not grow with its length."""

    def peak(count: int) -> int:
        nodes = [Node("Add-7", ("x" if not i else f"v{i - 1}", "x"), (f"v{i}",)) for i in range(count)]
        module = ProgramModule(program(nodes, outputs=(f"v{count - 1}",)), {})
        x = mx.ones((2**18,))
        mx.eval(x)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(module(x=x))
        return mx.get_peak_memory() - before

    assert peak(40) <= peak(4) + 2**20
