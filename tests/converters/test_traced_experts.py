"""Mixtures traced over the experts that their tokens chose."""

from __future__ import annotations

import numpy as np
import pytest
import toy
import toy_mixtures as mixtures

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.moe.traced_experts import enumerate_traced_experts
from mlx_transmuter.converters.pipeline import convert


def test_the_parts_of_the_split_become_the_experts_numbers(tmp_path):
    program = read_onnx(toy.write(tmp_path, mixtures.decoder("traced")) / "model.onnx")
    split = next(
        node for node in program.nodes if node.op.startswith("Split-") and len(node.outputs) == mixtures.EXPERTS
    )
    rewritten, record = apply_rewrite(program, enumerate_traced_experts)
    assert (record.replaced_count, record.skip_reasons) == (1, {})
    for i, name in enumerate(split.outputs):
        np.testing.assert_array_equal(rewritten.constants[name], [[i]])


def test_onnxruntime_runs_such_a_graph_only_where_every_expert_is_chosen():
    """16 tokens make 32 choices of 5 experts. Where the graph runs, it gives what a loop over all experts gives."""
    all_chosen, one_token = np.random.default_rng(1).integers(0, toy.VOCAB, 16).tolist(), [3]
    model = mixtures.decoder("traced")
    np.testing.assert_array_equal(
        toy.onnxruntime_logits(model, all_chosen), toy.onnxruntime_logits(mixtures.decoder("gathered"), all_chosen)
    )
    with pytest.raises(Exception, match=r"[Ss]plit"):
        toy.onnxruntime_logits(model, one_token)


def test_a_trace_that_lacks_experts_is_refused(tmp_path):
    model = mixtures.decoder("traced")
    depth = next(node for node in model.graph.node if node.op_type == "OneHot").input[1]
    toy.replace(model, depth, toy.numpy_helper.from_array(np.array(mixtures.EXPERTS + 2)))
    toy.write(tmp_path / "source", model)
    with pytest.raises(ConvertError, match=r"5 of 7 experts were chosen where the model was traced.*sequence_length"):
        convert(tmp_path / "source", "model.onnx", tmp_path / "out", progress=False)


def test_other_splits_are_left_alone(tmp_path):
    program = read_onnx(toy.write(tmp_path, mixtures.decoder("gathered")) / "model.onnx")
    _, record = apply_rewrite(program, enumerate_traced_experts)
    assert (record.replaced_count, record.skip_reasons) == (0, {})
