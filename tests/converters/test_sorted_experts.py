"""Mixtures whose sorted rows are split by the counts of the experts: they go through stacks; and near misses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy
import toy_mixtures as mixtures

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import SkippedMatch, apply_rewrite
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.moe.sorted_experts import stack_sorted_experts
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import Program


def graph(tmp_path) -> Program:
    return read_onnx(toy.write(tmp_path / "source", mixtures.decoder("sorted")) / "model.onnx")


@pytest.mark.parametrize("experts", [2, 7])
def test_rows_sorted_by_expert_go_through_stacks(experts, tmp_path):
    model, ids = mixtures.decoder("sorted", experts=experts), np.random.default_rng(0).integers(0, toy.VOCAB, 40)
    folder = convert(toy.write(tmp_path / "source", model), "model.onnx", tmp_path / "out", progress=False)
    program = load_folder(folder).decoder.program
    stacks = {path: program.weights[f"{path}.weight"].shape for path in program.layers if "experts" in path}
    assert sorted(stacks.values()) == [(experts, 64, 32), (experts, 64, 64)]  # gate and up in one
    splits = [node for node in program.nodes if node.op.startswith("Split-")]
    assert all(node.inputs[1] in program.constants for node in splits)
    for count in (1, 5, 40):
        expected = toy.onnxruntime_logits(model, ids[:count].tolist())
        np.testing.assert_allclose(
            toy.converted_logits(folder, ids[:count].tolist()), expected, atol=1e-5 * np.ptp(expected)
        )


def skip_reasons(program: Program) -> list[str]:
    return [match.reason for match in stack_sorted_experts(GraphView(program)) if isinstance(match, SkippedMatch)]


def test_each_product_is_one_stack(tmp_path):
    _, record = apply_rewrite(graph(tmp_path), stack_sorted_experts)
    assert (record.replaced_count, record.skip_reasons) == (3, {})


def test_parts_that_are_concatenated_in_another_order_are_skipped(tmp_path):
    program = graph(tmp_path)
    nodes = [
        replace(node, inputs=node.inputs[::-1])
        if node.op == "Concat-4" and len(node.inputs) == mixtures.EXPERTS
        else node
        for node in program.nodes
    ]
    expected = "its parts are not one product each, joined again in the order of the split"
    assert skip_reasons(replace(program, nodes=nodes)) == [expected] * 3


def test_matrices_of_different_types_are_skipped(tmp_path):
    program = graph(tmp_path)
    name = next(name for name in program.tensors if "experts.1.gate" in name)
    arrays = program.tensors | {name: replace(program.tensors[name], dtype="float16")}
    assert skip_reasons(replace(program, tensors=arrays)) == ["the matrices of its parts differ in shape, type or bias"]
