"""Mixtures of experts that gather their tokens, and the forms that stay as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from conftest import FIXTURES, golden

from converters.match import Declined, Graph, apply
from converters.names import name_weights
from converters.passes.experts import experts
from converters.passes.fold import fold
from converters.read import read
from mlx_transmuter.module import Module
from mlx_transmuter.program import Program
from mlx_transmuter.signature import outputs


def graph() -> Program:
    program = read(FIXTURES / "qwen3_moe" / "model.onnx")
    return apply(name_weights(program.select(outputs(value.name for value in program.outputs))), fold)[0]


def reasons(program: Program) -> list[str]:
    return [answer.reason for answer in experts(Graph(program)) if isinstance(answer, Declined)]


def test_each_expert_runs_over_all_tokens_and_keeps_its_own():
    """Four experts of the second layer: an index of tokens, one of choices, a gather and a scatter each."""
    program, record = apply(graph(), experts)
    assert (record.held, record.declined) == (16, {})
    kinds = {node.op.rpartition("-")[0] for node in program.nodes}
    assert not kinds & {"NonZero", "ScatterElements"}


def test_the_graph_itself_runs_where_sizes_may_depend_on_values():
    """The first row's golden logits, by the graph whose experts gather as many tokens as they were given."""
    import mlx.core as mx

    program, row = graph(), golden("qwen3_moe")["rows"][0]
    module = Module(program, {name: tensor.array() for name, tensor in program.arrays.items()})
    tokens = mx.array([row["prompt"]], mx.int32)
    feed = {value.name: mx.zeros((1, 2, 0, 8)) for value in program.inputs if value.name.startswith("past")}
    feed |= {"input_ids": tokens, "attention_mask": mx.ones_like(tokens)}
    logits = module.eagerly(**feed, position_ids=mx.arange(tokens.size)[None])["logits"]
    assert np.abs(np.array(logits[0, -1]) - row["logits"]).max() <= 1e-5 * np.ptp(row["logits"])


def test_indices_that_nothing_scatters_to_decline():
    program = graph()
    nodes = [
        replace(node, inputs=(node.inputs[0], node.inputs[1], node.inputs[2]), attrs={**node.attrs, "axis": 1})
        if node.op.startswith("ScatterElements")
        else node
        for node in program.nodes
    ]
    wanted = "its indices are no choice and token of which one alone is scattered to"
    assert reasons(replace(program, nodes=nodes)) == [wanted] * 4
