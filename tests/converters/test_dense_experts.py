"""Mixtures whose experts gather their tokens: each expert runs over all tokens; and near misses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conftest import FIXTURES, golden

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import SkippedMatch, apply_rewrite
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes.moe.dense_experts import make_experts_dense
from mlx_transmuter.converters.passes.simplify.fold_constants import fold_constants
from mlx_transmuter.program import Program
from mlx_transmuter.program.signature import outputs
from mlx_transmuter.runtime.module import ProgramModule


def graph() -> Program:
    program = read_onnx(FIXTURES / "qwen3_moe" / "model.onnx")
    return apply_rewrite(
        name_weights(program.select_outputs(outputs(value.name for value in program.outputs))), fold_constants
    )[0]


def skip_reasons(program: Program) -> list[str]:
    return [match.reason for match in make_experts_dense(GraphView(program)) if isinstance(match, SkippedMatch)]


def test_each_expert_runs_over_all_tokens_and_keeps_results_for_its_own():
    """Four experts of the second layer: an index of tokens, one of choices, a gather and a scatter each."""
    program, record = apply_rewrite(graph(), make_experts_dense)
    assert (record.replaced_count, record.skip_reasons) == (16, {})
    kinds = {node.op.rpartition("-")[0] for node in program.nodes}
    assert not kinds & {"NonZero", "ScatterElements"}


def test_the_unrewritten_graph_runs_eagerly():
    """The first row's golden logits, by the graph whose experts gather their tokens."""
    import mlx.core as mx

    program, row = graph(), golden("qwen3_moe")["rows"][0]
    module = ProgramModule(program, {name: tensor.to_device() for name, tensor in program.tensors.items()})
    tokens = mx.array([row["prompt"]], mx.int32)
    feed = {value.name: mx.zeros((1, 2, 0, 8)) for value in program.inputs if value.name.startswith("past")}
    feed |= {"input_ids": tokens, "attention_mask": mx.ones_like(tokens)}
    logits = module.call_eagerly(**feed, position_ids=mx.arange(tokens.size)[None])["logits"]
    assert np.abs(np.array(logits[0, -1]) - row["logits"]).max() <= 1e-5 * np.ptp(row["logits"])


def test_indices_that_no_node_scatters_to_are_skipped():
    program = graph()
    nodes = [
        replace(node, inputs=(node.inputs[0], node.inputs[1], node.inputs[2]), attrs={**node.attrs, "axis": 1})
        if node.op.startswith("ScatterElements")
        else node
        for node in program.nodes
    ]
    expected = "its indices are not those of choices and of tokens, only the latter scattered to"
    assert skip_reasons(replace(program, nodes=nodes)) == [expected] * 4
