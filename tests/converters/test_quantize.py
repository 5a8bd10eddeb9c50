"""Quantization in a conversion: weights against numpy, logits against onnxruntime, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from onnx import numpy_helper

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.precision import quantize
from mlx_transmuter.converters.precision.quantize import is_within_rounding_bound
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import (
    QUANTIZATION_BITS,
    QUANTIZATION_GROUP_SIZES,
    QUANTIZATION_NAMES,
    PrecisionError,
    PrecisionOptions,
    Quantization,
)
from mlx_transmuter.runtime.decoder import Decoder

ort = pytest.importorskip("onnxruntime")


def quantize_model(source: Path, out: Path, **options) -> Path:
    return convert(source, "model.onnx", out, progress=False, precision=PrecisionOptions(Quantization.of(options)))


def unpack(weight: np.ndarray, bits: int) -> np.ndarray:
    """The values in rows of uint32, the lowest bits first: MLX's packing, read bit by bit."""
    flags = np.unpackbits(weight.view(np.uint8), axis=1, bitorder="little")
    return (flags.reshape(len(weight), -1, bits) << np.arange(bits)).sum(-1)


def dequantized_layers(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each quantized layer: its weights as floats, the step of each, and whether it is at an end of its range."""
    program = load_folder(folder).decoder.program
    saved: Any = mx.load(str(folder / "model.safetensors"))
    arrays = {name: np.array(array) for name, array in saved.items()}
    layers = {}
    for path, layer in program.layers.items():
        if "bits" not in layer:
            continue
        value = unpack(arrays[f"{path}.weight"], layer["bits"])
        scale, bias = (
            np.repeat(arrays[f"{path}.{part}"].astype(np.float64), layer["group_size"], axis=1)
            for part in ("scales", "biases")
        )
        layers[path] = value * scale + bias, np.abs(scale), (value == 0) | (value == 2 ** layer["bits"] - 1)
    return layers


def dequantized_model(name: str, layers: dict) -> onnx.ModelProto:
    """The fixture's graph with the weights of the quantized layers in place of its own; a layer may have several of
    them, one below the other.
    """
    model = onnx.load(str(FIXTURES / name / "model.onnx"))
    unmatched_rows = {path: len(weight) for path, (weight, _, _) in layers.items()}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        candidates = [
            (np.abs(part - matrix).max(), path, is_transposed, part)
            for is_transposed, matrix in enumerate((array, array.T) if array.ndim == 2 else ())
            for path, (weight, _, _) in layers.items()
            for at in range(0, len(weight) - len(matrix) + 1, 8)
            if (part := weight[at : at + len(matrix)]).shape == matrix.shape
        ]
        error, path, is_transposed, part = min(candidates, key=lambda match: match[0], default=(np.inf, "", 0, array))
        if error < 0.5 * np.abs(array).max():
            new = (part.T if is_transposed else part).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
            unmatched_rows[path] -= len(part)
    assert all(count <= 0 for count in unmatched_rows.values())  # a tied table may stand in the file twice
    return model


def onnxruntime_logits(model: onnx.ModelProto, ids: list[int]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    feed["position_ids"] = np.arange(len(ids))[None]
    inputs = {value.name: value for value in session.get_inputs()}
    for value in inputs.values():
        if "past" in value.name:
            feed[value.name] = np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
    return session.run(["logits"], {name: feed[name] for name in inputs})[0][0, -1]


def module_logits(folder: Path, ids: list[int]) -> np.ndarray:
    session = Decoder(load_folder(folder).decoder, 1).begin_session([len(ids)])
    logits = session.step(np.array([ids], np.int32), [len(ids)])
    session.evaluate(logits)
    return ops.to_host(logits[0])


# Weights and logits.


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"bits": 4}), ("llama", {"bits": 8}), ("llama", {"recipe": "mixed_3_6"}), ("gemma", {"bits": 6}),
        ("gpt2", {"bits": 5}), ("bloom", {"bits": 3}), ("phi3", {"bits": 2}),
    ],
)  # fmt: skip
def test_weights_are_near_their_floats_and_logits_are_onnxruntimes_for_these_weights(
    name, options, tmp_path, monkeypatch
):
    original: dict[str, np.ndarray] = {}
    real = quantize.quantize_layers

    def recording(program, *args):
        original.update({name: tensor.read().astype(np.float64) for name, tensor in program.tensors.items()})
        return real(program, *args)

    monkeypatch.setattr(quantize, "quantize_layers", recording)
    folder = quantize_model(FIXTURES / name, tmp_path / "out", group_size=32, **options)
    layers = dequantized_layers(folder)
    for path, (weight, step, end) in layers.items():
        error = np.abs(weight - original[f"{path}.weight"])
        assert (error <= np.where(end, 1, 0.5) * step * (1 + 1e-4)).all()
        assert (error > 0.4 * step).any()  # the bound is no wider than it must be
    ids = [17, 40, 33, 101, 64, 29, 87, 90]
    expected = onnxruntime_logits(dequantized_model(name, layers), ids)
    assert np.abs(module_logits(folder, ids) - expected).max() <= 1e-4 * np.ptp(expected)


def test_the_arrays_are_those_of_nn_quantize_on_the_float_module(converted, tmp_path):
    """The same arrays under the same names."""
    quantized = load_folder(quantize_model(FIXTURES / "gemma", tmp_path / "out", group_size=32)).decoder
    module = load_folder(converted("gemma")).decoder

    def has_whole_groups(path, layer):
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

    nn.quantize(module, group_size=32, bits=4, class_predicate=has_whole_groups)
    expected, arrays = dict(tree_flatten(module.parameters())), dict(tree_flatten(quantized.parameters()))
    assert arrays.keys() == expected.keys()
    assert all(mx.array_equal(arrays[name], expected[name]) for name in expected)


def test_tied_weights_are_stored_once_and_a_layer_without_whole_groups_stays_in_float(tmp_path):
    folder = quantize_model(FIXTURES / "gemma", tmp_path / "out", group_size=32)
    program = load_folder(folder).decoder.program
    tables = [path for path, layer in program.layers.items() if layer["kind"] == "QuantizedEmbedding"]
    assert len(tables) == 1
    assert [node.op for node in program.nodes if tables[0] in node.inputs] == ["mlx.embedding", "mlx.as_linear"]
    unquantized = program.metadata["quantization"]["kept"]
    assert set(unquantized) == {path for path, layer in program.layers.items() if layer["kind"] == "Linear"}
    assert set(unquantized.values()) == {"its 48 columns are no multiple of 32"}


def test_a_line_on_stderr_counts_quantized_and_unquantized_layers(tmp_path, capsys):
    convert(
        FIXTURES / "llama",
        "model.onnx",
        tmp_path / "out",
        precision=PrecisionOptions(Quantization.of({"group_size": 32})),
    )
    line = "quantized 8 layers: 8 in 4 bits, groups of 32; 2 stay as they are (model.layers.0.mlp.down_proj): its 48"
    assert line in capsys.readouterr().err


def test_the_change_of_the_logits_is_recorded(tmp_path):
    records = {}
    for bits in (2, 4, 8):
        folder = quantize_model(FIXTURES / "llama", tmp_path / str(bits), bits=bits, group_size=32)
        metadata = load_folder(folder).decoder.program.metadata
        assert metadata["proof"]["error"] < 1e-4  # the float module's
        records[bits] = metadata["quantization"]
        assert f"by up to {records[bits]['error']:.1e} of their range" in (folder / "README.md").read_text()
    for measure in ("error", "divergence"):
        assert 0 < records[8][measure] < records[4][measure] < records[2][measure]
    # A second measure: the two folders side by side on other tokens.
    ids = [200, 199, 198, 180, 170]
    plain = module_logits(convert(FIXTURES / "llama", "model.onnx", tmp_path / "float", progress=False), ids)
    error = np.abs(module_logits(tmp_path / "8", ids) - plain).max() / np.ptp(plain)
    assert records[8]["error"] / 10 < error < records[8]["error"] * 10


def test_float16_weights_have_float16_scales(tmp_path):
    program = load_folder(quantize_model(FIXTURES / "llama_fp16", tmp_path / "out", group_size=32)).decoder.program
    assert program.weights["lm_head.scales"].dtype == "float16"
    assert {value.dtype for value in program.outputs} == {"float16"}


@settings(max_examples=60)
@given(
    st.sampled_from(QUANTIZATION_BITS), st.sampled_from(QUANTIZATION_GROUP_SIZES), st.sampled_from([mx.float32, mx.float16]),
    st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 300.0]), st.sampled_from([1e-4, 0.02, 1.0, 100.0]),
)  # fmt: skip
def test_all_weights_are_within_the_bound_and_a_wrong_one_is_not(bits, group, dtype, seed, offset, size):
    draw = np.random.default_rng(seed)
    weight = mx.array(draw.normal(offset, size, (3, 2 * group)).astype(np.float32)).astype(dtype)
    quantized = list(mx.quantize(weight, group_size=group, bits=bits))
    assert is_within_rounding_bound(weight, *quantized, bits)
    step = float(mx.abs(quantized[1][1, 1]).item())
    info = mx.finfo(dtype)  # what is below the smallest normal number is held to that number's precision
    rounding = float(info.eps) * (2**bits * max(step, float(info.smallest_normal)) + offset + 10 * size)
    error = 2.1 * step + 2 * rounding  # the weight may have been a step below
    wrong = np.array(weight.astype(mx.float32))
    wrong[1, group + 3] += error
    assert not is_within_rounding_bound(mx.array(wrong), *quantized, bits)


# What is refused.


def test_a_quantized_file_is_refused(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    with pytest.raises(ConvertError, match="quantized already"):
        quantize_model(FIXTURES / "llama_q4", tmp_path / "out")
    (tmp_path / "dynamic").mkdir()
    quantize_dynamic(FIXTURES / "llama" / "model.onnx", tmp_path / "dynamic" / "model.onnx")
    with pytest.raises(ConvertError, match="quantized already"):
        quantize_model(tmp_path / "dynamic", tmp_path / "out")


def test_a_model_without_a_layer_of_whole_groups_is_refused(tmp_path):
    with pytest.raises(ConvertError, match=r"no layer that can be quantized in groups of 64.*its 8 columns"):
        quantize_model(toy.write(tmp_path / "source", toy.decoder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = onnx.load(str(FIXTURES / "llama" / "model.onnx"))
    table = next(tensor for tensor in model.graph.initializer if "embed_tokens" in tensor.name)
    array = numpy_helper.to_array(table).copy()
    array[-1, 3] = np.inf  # a row that the proof's prompts don't read
    table.CopyFrom(numpy_helper.from_array(array, table.name))
    toy.write(tmp_path / "source", model)
    with pytest.raises(ConvertError, match=r"model.embed_tokens.weight, which 4 bits in groups of 32 cannot represent"):
        quantize_model(tmp_path / "source", tmp_path / "out", group_size=32)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("4bits", "quantize '4bits'; expected 2bit 3bit .* use \"4bit\""),
        ("7bit", "quantize '7bit'"),
        ("mixed_3_5", 'use "mixed_3_'),
        ({"recipe": "mixed3_6"}, "recipe 'mixed3_6'.*use \"mixed_3_6\""),
        ({"bits": 7}, "bits 7; expected one of 2, 3, 4, 5, 6, 8"),
        ({"bits": "4"}, "bits '4'"),
        ({"group_size": 16}, "group_size 16; expected one of 32, 64, 128"),
        ({"group": 64}, "the key 'group'.*use \"group_size\""),
        ({"bits": 4, "recipe": "mixed_3_6"}, "4 bits and the recipe mixed_3_6"),
    ],
)
def test_quantizations_that_mlx_lacks_are_refused(spec, match):
    with pytest.raises(PrecisionError, match=match):
        Quantization.of(spec)


def test_names_and_mappings_make_the_same_quantization():
    assert Quantization.of("4bit") == Quantization.of({}) == Quantization.of({"bits": 4, "group_size": 64})
    assert (
        Quantization.of("mixed_2_6") == Quantization.of({"recipe": "mixed_2_6"}) == Quantization(2, 64, 6, "mixed_2_6")
    )
    assert [Quantization.of(name).name for name in QUANTIZATION_NAMES] == list(QUANTIZATION_NAMES)
