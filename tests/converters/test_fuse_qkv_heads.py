"""fuse_qkv_heads: the heads of a merged product are split, rotated and stored in one node each where they can be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fixture_programs import program_before

from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.passes.attention.fuse_qkv_heads import fuse_qkv_heads
from mlx_transmuter.program import Node


def test_heads_are_split_in_one_node_and_queries_and_keys_rotated_in_one():
    program = program_before("llama", fuse_qkv_heads)
    after, record = apply_rewrite(program, fuse_qkv_heads)
    assert (
        record.replaced_count == 14
    )  # a split, three mlx.split_heads, two rotations and an attention in each of two layers
    kinds = [node.op_type for node in after.nodes]
    assert (kinds.count("mlx.split_heads"), kinds.count("mlx.rotary"), kinds.count("Split")) == (2, 2, 4)
    assert [node.attrs["heads"] for node in after.nodes if node.op == "mlx.rotary"] == [6, 6]
    assert [node.inputs[2] for node in after.nodes if node.op == "mlx.attention"] == ["", ""]
    after.validate()


@pytest.mark.parametrize("change", ["values are read", "keys are read", "two pools", "fewer values"])
def test_keys_and_values_that_are_not_stored_together_are_split(change):
    program = program_before("llama", fuse_qkv_heads)
    node = next(node for node in program.nodes if node.op == "mlx.attention")
    at = program.nodes.index(node)
    if change == "two pools":  # such a program does not run, but the rewrite reads no more of it
        program.nodes[at] = replace(node, inputs=(*node.inputs[:4], node.inputs[3], *node.inputs[5:]))
    elif change == "fewer values":
        split = [node for node in program.nodes if node.op == "mlx.split_heads"][2]
        program.nodes[program.nodes.index(split)] = replace(split, attrs={"heads": 1})
        product = next(node for node in program.nodes if node.outputs[:1] and split.inputs[0] in node.outputs)
        sizes = program.constants[product.inputs[1]]
        program.constants[product.inputs[1]] = np.array([*sizes[:2], sizes[2] // 2])
    else:
        program.nodes.insert(at, Node("Abs-6", (node.inputs[2 if change == "values are read" else 1],), ("too",)))
    after, _ = apply_rewrite(program, fuse_qkv_heads)
    first, second = [node for node in after.nodes if node.op == "mlx.attention"]
    assert first.inputs[1:3] == node.inputs[1:3]
    assert second.inputs[2] == ""


@pytest.mark.parametrize("change", ["other angles", "other sizes", "read before"])
def test_heads_that_differ_are_split_or_rotated_separately(change):
    program = program_before("llama", fuse_qkv_heads)
    first, second = [node for node in program.nodes if node.op == "mlx.rotary"][:2]
    split = next(node for node in program.nodes if node.op == "mlx.split_heads")
    at = program.nodes.index
    if change == "other angles":
        program.nodes[at(second)] = replace(second, inputs=(second.inputs[0], second.inputs[2], second.inputs[1]))
        expected = (3, 2)  # mlx.rotary and mlx.split_heads
    elif change == "other sizes":
        program.nodes[at(split)] = replace(split, attrs={"heads": 2 * split.attrs["heads"]})
        expected = (3, 4)
    else:
        program.nodes.insert(at(first) + 1, Node("Abs-6", first.outputs, ("early",)))
        expected = (3, 2)
    kinds = [node.op for node in apply_rewrite(program, fuse_qkv_heads)[0].nodes]
    assert (kinds.count("mlx.rotary"), kinds.count("mlx.split_heads")) == expected
