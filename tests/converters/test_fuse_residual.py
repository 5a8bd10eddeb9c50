"""Sums with the residual stream: which are fused with their product, and that this keeps the numbers."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from fixture_programs import program_before, skip_reasons

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.graph.shape_probe import make_step_inputs
from mlx_transmuter.converters.passes.layers.fuse_residual import fuse_residual_add
from mlx_transmuter.converters.passes.logits.last_token_logits import gather_last_token_logits
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule

READ = "the product is read by another node too; expected one that only the sum reads"
SHAPES = "the product and the residual differ in shape; expected one shape in every size"


def fused_and_other_sums(program: Program) -> list[Node]:
    """The products that are fused with a sum, and the sums of products."""
    graph = GraphView(program)
    linear = [node for node in program.nodes if node.op == "mlx.linear"]
    added = [node for node in program.nodes if node.op.startswith("Add-")]
    return [node for node in linear if len(node.inputs) > 2] + [
        node for node in added if any(graph.producer(name, "mlx.linear") for name in node.inputs)
    ]


def outputs(program: Program) -> dict[str, np.ndarray]:
    """The outputs for random tokens after a random cache: two rows of three tokens after seven."""
    draw = np.random.default_rng(0)
    signature = DecoderSignature.from_program(program)
    inputs = make_step_inputs(program, signature, 2, 7, 3)
    for entry in signature.cache_pairs:
        inputs[entry.past] = mx.array(draw.normal(size=inputs[entry.past].shape).astype(np.float32))
    inputs[signature.token_input] = mx.array(draw.integers(0, 90, (2, 3)))
    arrays = {name: tensor.to_device() for name, tensor in program.tensors.items()}
    results = ProgramModule(program, arrays)(**inputs)
    return {name: np.array(value) for name, value in results.items()}


def assert_same_outputs(program: Program, rewritten: Program) -> None:
    """Both programs give the same but for rounding: a product is not rounded on its own before the sum."""
    actual, expected = outputs(rewritten), outputs(program)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-5)


def with_nodes(program: Program, at: Node, *nodes: Node) -> Program:
    """The program with `nodes` in place of the node `at`."""
    where = program.nodes.index(at)
    return replace(program, nodes=[*program.nodes[:where], *nodes, *program.nodes[where + 1 :]])


def first_sum(program: Program) -> tuple[Node, str, str]:
    """The first Add of a product and another value, with the names of both."""
    graph = GraphView(program)
    for node in program.nodes:
        if node.op.startswith("Add-"):
            product = [name for name in node.inputs if graph.producer(name, "mlx.linear")]
            other = [name for name in node.inputs if name not in product]
            if len(product) == 1:
                return node, product[0], other[0]
    raise AssertionError("no sum of a product")


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama_q4", "opt"])
def test_both_sums_of_each_layer_are_fused(name):
    program = program_before(name, fuse_residual_add)
    after, record = apply_rewrite(program, fuse_residual_add)
    assert (record.replaced_count, record.skip_reasons) == (4, {})
    assert [len(node.inputs) for node in fused_and_other_sums(after)] == [3] * 4
    assert len(after.nodes) == len(program.nodes) - 4
    assert_same_outputs(program, after)


def test_a_residual_may_be_computed_after_the_product():
    program = program_before("llama", fuse_residual_add)
    node, product, other = first_sum(program)
    late = [Node("Abs-6", (other,), ("late",)), replace(node, inputs=("late", product))]
    program = with_nodes(program, node, *late)
    after, record = apply_rewrite(program, fuse_residual_add)
    assert record.replaced_count == 4
    assert after.producers()[node.outputs[0]].inputs[2] == "late"
    assert_same_outputs(program, after)


@pytest.mark.parametrize("change", ["read by another node", "an output", "added to itself"])
def test_a_product_that_another_node_reads_is_skipped(change):
    program = program_before("llama", fuse_residual_add)
    node, product, _ = first_sum(program)
    if change == "read by another node":
        program = replace(program, nodes=[*program.nodes, Node("Abs-6", (product,), ("too",))])
    elif change == "an output":
        program = replace(program, outputs=(*program.outputs, Value(product, "float32", None)))
    else:
        program = with_nodes(program, node, replace(node, inputs=(product, product)))
    assert skip_reasons(program, fuse_residual_add) == [READ]
    after, record = apply_rewrite(program, fuse_residual_add)
    assert record.replaced_count == 3
    assert after.producers()[node.outputs[0]].op == node.op
    if change == "an output":
        assert_same_outputs(program, after)


@pytest.mark.parametrize("axes", [1, 2])
def test_a_sum_that_broadcasts_the_residual_is_skipped(axes):
    """A residual of fewer axes, or with an axis of size 1, has the shape of the sum in some steps only."""
    program = program_before("llama", fuse_residual_add)
    node, product, other = first_sum(program)
    program.constants["axis"] = np.array([1] if axes == 2 else [0, 1])
    mean = Node("ReduceMean-18", (other, "axis"), ("mean",), {"keepdims": int(axes == 2)})
    program = with_nodes(program, node, mean, replace(node, inputs=("mean", product)))
    assert skip_reasons(program, fuse_residual_add) == [SHAPES]
    assert apply_rewrite(program, fuse_residual_add)[1].replaced_count == 3


def test_a_sum_that_broadcasts_the_product_is_skipped():
    program = program_before("llama", fuse_residual_add)
    made = program.producers()[first_sum(program)[1]]
    program.constants["axis"] = np.array([1])
    mean = Node("ReduceMean-18", (made.inputs[0], "axis"), ("mean",), {"keepdims": 1})
    program = with_nodes(program, made, mean, replace(made, inputs=("mean", made.inputs[1])))
    assert skip_reasons(program, fuse_residual_add) == [SHAPES]
    assert apply_rewrite(program, fuse_residual_add)[1].replaced_count == 3


def test_a_sum_of_two_products_is_fused_with_the_one_without_bias():
    """gptj adds the products of attention and MLP before the stream; only the second has a bias, which is a sum
    itself.
    """
    program = program_before("gptj", fuse_residual_add)
    for turned in (False, True):
        if turned:
            nodes = [replace(n, inputs=n.inputs[::-1]) if n.op.startswith("Add-") else n for n in program.nodes]
            program = replace(program, nodes=nodes)
        after, record = apply_rewrite(program, fuse_residual_add)
        taken = [node for node in fused_and_other_sums(after) if len(node.inputs) > 2]
        assert record.replaced_count == len(taken) == 2
        assert {node.inputs[1] for node in taken} == {f"transformer.h.{i}.attn.out_proj" for i in range(2)}
        assert_same_outputs(program, after)


def test_both_products_of_a_chain_of_sums_are_fused():
    """x + attention + MLP instead of attention + MLP + x."""
    program = program_before("gptj", fuse_residual_add)
    graph = GraphView(program)
    for node in program.nodes:
        if node.op.startswith("Add-") and all(graph.producer(name, "mlx.linear") for name in node.inputs):
            after = graph.only_consumer(node.outputs[0])
            assert after is not None
            x = next(name for name in after.inputs if name not in node.outputs)
            program = with_nodes(program, node, replace(node, inputs=(node.inputs[0], x)))
            program = with_nodes(program, after, replace(after, inputs=(node.outputs[0], node.inputs[1])))
    rewritten, record = apply_rewrite(program, fuse_residual_add)
    assert record.replaced_count == 4
    assert [len(node.inputs) for node in fused_and_other_sums(rewritten)] == [3] * 4
    assert_same_outputs(program, rewritten)


def test_a_second_pass_finds_nothing():
    for name in ("llama", "gptj"):
        after, _ = apply_rewrite(program_before(name, fuse_residual_add), fuse_residual_add)
        assert apply_rewrite(after, fuse_residual_add)[1].replaced_count == 0


def test_logits_with_a_residual_are_computed_for_every_token():
    program = program_before("llama", gather_last_token_logits)
    assert apply_rewrite(program, gather_last_token_logits)[1].replaced_count == 1
    head = program.producers()["logits"]
    program = with_nodes(program, head, replace(head, inputs=(*head.inputs, "more")))
    assert apply_rewrite(program, gather_last_token_logits)[1].replaced_count == 0
