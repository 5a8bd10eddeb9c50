"""Mixtures traced over the experts that their tokens hit."""

from __future__ import annotations

import mixtures_in_toy as mixtures
import numpy as np
import pytest
import toy

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.moe.traced_experts import enumerate_traced_experts
from mlx_transmuter.converters.pipeline import convert


def test_the_parts_are_the_experts_numbers(tmp_path):
    program = read_onnx(toy.write(tmp_path, mixtures.decoder("hit")) / "model.onnx")
    split = next(
        node for node in program.nodes if node.op.startswith("Split-") and len(node.outputs) == mixtures.EXPERTS
    )
    made, record = apply_rewrite(program, enumerate_traced_experts)
    assert (record.replaced_count, record.skip_reasons) == (1, {})
    for i, name in enumerate(split.outputs):
        np.testing.assert_array_equal(made.constants[name], [[i]])


def test_onnxruntime_runs_such_a_graph_where_every_expert_is_hit_and_only_there():
    """With 16 tokens in 32 choices of 5 experts; where it runs it gives what a loop over all experts does."""
    hit_all, one = np.random.default_rng(1).integers(0, toy.VOCAB, 16).tolist(), [3]
    model = mixtures.decoder("hit")
    np.testing.assert_array_equal(toy.expected(model, hit_all), toy.expected(mixtures.decoder("gathered"), hit_all))
    with pytest.raises(Exception, match=r"[Ss]plit"):
        toy.expected(model, one)


def test_a_trace_that_lacks_experts_is_refused(tmp_path):
    model = mixtures.decoder("hit")
    depth = next(node for node in model.graph.node if node.op_type == "OneHot").input[1]
    toy.replace(model, depth, toy.numpy_helper.from_array(np.array(mixtures.EXPERTS + 2)))
    toy.write(tmp_path / "source", model)
    with pytest.raises(ConvertError, match=r"5 of 7 experts were chosen where the model was traced.*sequence_length"):
        convert(tmp_path / "source", "model.onnx", tmp_path / "out", progress=False)


def test_other_splits_stay(tmp_path):
    program = read_onnx(toy.write(tmp_path, mixtures.decoder("gathered")) / "model.onnx")
    _, record = apply_rewrite(program, enumerate_traced_experts)
    assert (record.replaced_count, record.skip_reasons) == (0, {})
