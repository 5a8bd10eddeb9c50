"""Names of weights: those of the exporter's scopes, unique, and none inside another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.program import Node, Program, Value, WeightInfo


def program(*readers: Node, names=()) -> Program:
    found = dict.fromkeys(
        [*names, *(name for node in readers for name in node.inputs if name.startswith("onnx::") or "." in name)]
    )
    arrays = {name: LazyTensor("float32", (i + 1,), lambda: None) for i, name in enumerate(found)}  # type: ignore[arg-type]
    return Program(
        (Value("x", "float32", None),), (Value("y", "float32", None),), [*readers, Node("Identity-1", ("x",), ("y",))],
        weights={name: WeightInfo(array.dtype, array.shape) for name, array in arrays.items()}, tensors=arrays,
    )  # fmt: skip


def renamed(before: Program) -> dict[str, str]:
    """Old name -> new name, by the shapes, which differ."""
    after = name_weights(before)
    assert after.weights.keys() == after.tensors.keys()
    after.validate()
    new = {weight.shape: name for name, weight in after.weights.items()}
    assert len(new) == len(before.weights)
    return {name: new[weight.shape] for name, weight in before.weights.items()}


def node(op: str, inputs, name: str) -> Node:
    return Node(op, tuple(inputs), (f"{name} of {op}",), name=name)


def test_a_dotted_name_of_the_exporter_is_kept():
    names = renamed(program(node("MatMul-1", ["x", "model.norm.weight"], "/model/norm/Mul")))
    assert names == {"model.norm.weight": "model.norm.weight"}


@pytest.mark.parametrize(
    ("op", "index", "scope", "wanted"),
    [
        ("MatMul-1", 1, "/model/layers.0/self_attn/q_proj/MatMul", "model.layers.0.self_attn.q_proj.weight"),
        ("Add-7", 1, "/model/layers.0/self_attn/q_proj/Add", "model.layers.0.self_attn.q_proj.bias"),
        ("Gemm-11", 2, "/transformer/h.1/attn/c_attn/Gemm", "transformer.h.1.attn.c_attn.bias"),
        ("LayerNormalization-17", 1, "/transformer/ln_f/LayerNormalization", "transformer.ln_f.weight"),
        (
            "com.microsoft.MatMulNBits-1",
            2,
            "/model/layers.3/mlp/up_proj/MatMul_Q4",
            "model.layers.3.mlp.up_proj.scales",
        ),
        (
            "com.microsoft.GroupQueryAttention-1",
            7,
            "/model/layers.0/attn/GroupQueryAttention",
            "model.layers.0.attn.cos",
        ),
        ("Gather-1", 0, "node_embedding", "node_embedding.weight"),
        ("Erf-9", 0, "", "erf.erf"),
    ],
)
def test_a_folded_weight_takes_the_scope_of_its_reader(op, index, scope, wanted):
    inputs = ["x"] * index + ["onnx::weight_733"]
    assert renamed(program(node(op, inputs, scope)))["onnx::weight_733"] == wanted


def test_names_are_unique_and_none_is_inside_another():
    """Two weights have one scope, one gets the name of a value, and one has a path that is another weight's name."""
    before = program(
        node("MatMul-1", ["x", "onnx::1"], "/m/q/MatMul"),
        node("MatMul-1", ["x", "onnx::2"], "/m/q/MatMul_1"),
        node("Mul-7", ["x", "m.q.weight"], "/other/Mul"),
        node("MatMul-1", ["x", "onnx::3"], "/m/k/MatMul"),
        Node("Neg-6", ("x",), ("m.k.weight",)),
        node("MatMul-1", ["x", "a.b"], "/plain/MatMul"),
        node("MatMul-1", ["x", "a.b.c"], "/plain/MatMul_1"),
    )
    names = renamed(before)
    assert names["m.q.weight"] == "m.q.weight"
    assert {names["onnx::1"], names["onnx::2"]} == {"m.q.weight_2", "m.q.weight_3"}
    assert names["onnx::3"] == "m.k.weight_2"
    for one in names.values():
        assert not any(other.startswith(one + ".") for other in names.values())


def test_leading_underscores_which_MLX_hides_are_removed():
    names = renamed(program(node("MatMul-1", ["x", "onnx::1"], "/_orig_mod/__x__/MatMul"), names=["_w..a/b"]))
    assert names == {"_w..a/b": "w.a.b", "onnx::1": "orig_mod.x.weight"}


def test_readers_in_branches_and_outputs_read_the_new_names():
    inner = Program(
        (), (Value("t", "float32", None),), [Node("MatMul-1", ("x", "onnx::1"), ("t",), name="/m/q/MatMul")]
    )
    before = program(
        Node("If-1", ("x",), ("z",), {"then_branch": inner, "else_branch": inner}), names=["onnx::1", "onnx::2"]
    )
    before = replace(before, outputs=(*before.outputs, Value("onnx::2", "float32", None)))
    after = name_weights(before)
    branches = [*after.nodes[0].subprograms()]
    assert [one.nodes[0].inputs[1] for one in branches] == ["m.q.weight"] * 2
    assert after.outputs[1].name in after.weights
