"""The memory of a conversion: a model larger than it converts to the same folder, with its weights read at each use."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import toy
from conftest import FIXTURES
from conversions import folder_contents

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader import lazy_tensor
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import memory_budget
from mlx_transmuter.converters.proof.memory_budget import MemoryBudget
from mlx_transmuter.converters.proof.staged_weights import StagedWeights
from mlx_transmuter.precision_options import PrecisionOptions, Quantization

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
make_random_model = importlib.import_module("make_random_model")

PRECISIONS = {
    "as it is": PrecisionOptions(),
    "bfloat16": PrecisionOptions(dtype="bfloat16"),
    "8 bits": PrecisionOptions(dtype="float16", quantize=Quantization(bits=8, group_size=32, more_bits=8)),
}


def convert_with(out, name: str, precision: PrecisionOptions, max_memory: int | None):
    convert(FIXTURES / name, "model.onnx", out, progress=False, precision=precision, max_memory=max_memory)
    contents = folder_contents(out)
    program = json.loads(contents.pop("program.json"))
    return contents, program


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((("llama", p)) for p in PRECISIONS), ("qwen3_moe", "as it is"), ("gpt2_merged", "as it is")],
)
def test_a_model_larger_than_memory_has_the_same_folder(name, precision, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_budget, "BASE_BYTES", 0)
    contents, program = convert_with(tmp_path / "fits", name, PRECISIONS[precision], None)
    largest = max(tensor.read().nbytes for tensor in read_onnx(FIXTURES / name / "model.onnx").tensors.values())
    streamed_contents, streamed = convert_with(tmp_path / "streamed", name, PRECISIONS[precision], 2 * largest)
    cards = [folder.pop("README.md") for folder in (contents, streamed_contents)]
    assert [b"read at each use" in card for card in cards] == [False, True]
    assert streamed_contents == contents
    metadata, streamed_metadata = program.pop("meta"), streamed.pop("meta")
    assert streamed == program
    assert (metadata["proof"].get("streamed"), streamed_metadata["proof"]["streamed"]) == (None, True)


def test_a_weight_that_no_memory_holds_is_refused(tmp_path):
    source = toy.write(tmp_path / "source", toy.decoder())
    with pytest.raises(ConvertError, match=r"the weight .* bytes, which takes .* expected at most the 300000000 bytes"):
        convert(source, "model.onnx", tmp_path / "out", progress=False, max_memory=memory_budget.BASE_BYTES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_weight_is_in_memory_twice(streams, precision, tmp_path, monkeypatch):
    """No more than the weights that a module has is in memory; of a streamed one a few weights."""
    shape = make_random_model.Shape(vocab=2048, hidden=128, intermediate=256, layers=16, heads=2, kv_heads=1)
    path = make_random_model.make_model(tmp_path / "source", shape, "float32", "inline")
    most, total = 0, path.stat().st_size

    def counted(method):
        def read(*args):
            nonlocal most
            array = method(*args)
            mx.eval(array)
            most = max(most, mx.get_active_memory())
            return array

        return read

    monkeypatch.setattr(MemoryBudget, "holds", lambda self, program: not streams)
    monkeypatch.setattr(LazyTensor, "to_device", counted(LazyTensor.to_device))
    monkeypatch.setattr(StagedWeights, "read", counted(StagedWeights.read))
    monkeypatch.setattr(lazy_tensor, "ROWS_BYTES", 2**16)
    mx.clear_cache()
    before = mx.get_active_memory()
    convert(path.parent, path.name, tmp_path / "out", progress=False, precision=PRECISIONS[precision])
    largest = 4 * 2048 * 128
    if streams:
        assert most - before < total * 0.6  # weights, and the caches of all layers
    else:
        assert total - largest < most - before < total + 2 * largest
