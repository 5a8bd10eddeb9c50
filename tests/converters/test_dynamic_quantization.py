"""Dynamic 8-bit files, as transformers.js' `_quantized`: their first logits are those of onnxruntime."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest
from conftest import FIXTURES

from mlx_transmuter import ops
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.runtime.decoder import Decoder

ort = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_dynamic_file_converts_and_its_first_logits_are_those_of_onnxruntime(name, per_channel, tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = tmp_path / "source"
    shutil.copytree(FIXTURES / name, source)
    (source / "model.onnx").unlink()
    quantize_dynamic(
        FIXTURES / name / "model.onnx", source / "model.onnx", weight_type=QuantType.QInt8, per_channel=per_channel
    )
    module = load_folder(convert(source, "model.onnx", tmp_path / "out", progress=False)).decoder
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(str(source / "model.onnx"), options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(30, 120, (1, 8))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(8)[None]}
    feed |= {
        v.name: np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32) for v in session.get_inputs() if "past" in v.name
    }
    expected = session.run(["logits"], {v.name: feed[v.name] for v in session.get_inputs()})[0][0, -1]
    run = Decoder(module, 1).begin_session([8])
    logits = run.step(ids.astype(np.int32), [8])
    run.evaluate(logits)
    actual = ops.to_host(logits[0].astype(mx.float32))
    # A value that rounds the other way moves by 1/255 of its range, and the next layers carry the difference on.
    assert np.abs(actual - expected).max() <= 5e-2 * np.ptp(expected)
    assert np.corrcoef(actual, expected)[0, 1] > 0.999
