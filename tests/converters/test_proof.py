"""The proof: its batch, its reference, and the error of logits."""

from __future__ import annotations

import numpy as np
import pytest
import toy

from mlx_transmuter import ops
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.proof import proof
from mlx_transmuter.program.signature import DecoderSignature
from mlx_transmuter.runtime.module import ProgramModule

IDS = [3, 1, 15, 7]


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


def test_the_error_is_relative_to_the_spread_and_infinite_where_only_one_side_is_finite():
    reference = [[np.array([0.0, 10.0, 5.0])], []]
    assert proof.logit_error([[np.array([0.0, 10.0, 5.5])], []], reference) == pytest.approx(0.05)
    for value in (np.nan, np.inf, -np.inf):
        assert proof.logit_error([[np.array([0.0, 10.0, value])], []], reference) == float("inf")
    hidden = [[np.array([0.0, 10.0, -np.inf])], []]
    assert proof.logit_error(hidden, hidden) == 0
    assert proof.logit_error(reference, hidden) == float("inf")
    with pytest.raises(ValueError):
        proof.logit_error([[], []], reference)


def test_the_batch_has_ragged_rows_a_padding_row_and_decode_steps():
    batch = proof.ProofBatch.random(64, [13, 5, 0])
    assert [len(prompt) for prompt in batch.prompts] == [13, 5, 0]
    assert {len(following) for following in batch.decode_tokens} == {proof.DECODE_STEPS}
    assert all(16 <= token < 64 for row in (*batch.prompts, *batch.decode_tokens) for token in row)


def test_the_reference_logits_are_those_of_onnxruntime(source):
    program = name_weights(read_onnx(source / "model.onnx"))
    module = ProgramModule(program, {name: ops.to_device(tensor.read()) for name, tensor in program.tensors.items()})
    batch = proof.ProofBatch([IDS, []], [[2, 9], [4, 4]])
    logits_of_row, padding = proof.reference_logits(module, DecoderSignature.from_program(program), batch)
    assert padding == []
    for i, logits in enumerate(logits_of_row):
        np.testing.assert_allclose(
            logits, toy.onnxruntime_logits(source / "model.onnx", [*IDS, 2, 9][: len(IDS) + i]), atol=1e-4
        )
