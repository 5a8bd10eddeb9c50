"""Quantization on the way: the weights against numpy, the logits against onnxruntime, and what is refused."""

from __future__ import annotations

from pathlib import Path

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


def run(source: Path, out: Path, **wanted) -> Path:
    return convert(source, "model.onnx", out, progress=False, precision=PrecisionOptions(Quantization.of(wanted)))


def unpacked(weight: np.ndarray, bits: int) -> np.ndarray:
    """The values of rows of uint32, the lowest bits first: MLX's packing, read bit by bit."""
    flags = np.unpackbits(weight.view(np.uint8), axis=1, bitorder="little")
    return (flags.reshape(len(weight), -1, bits) << np.arange(bits)).sum(-1)


def floats(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each quantized layer: its weight in floats, the step of each, and whether it is at an end of its range."""
    program = load_folder(folder).decoder.program
    arrays = {name: np.array(array) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    found = {}
    for path, layer in program.layers.items():
        if "bits" not in layer:
            continue
        value = unpacked(arrays[f"{path}.weight"], layer["bits"])
        scale, bias = (
            np.repeat(arrays[f"{path}.{part}"].astype(np.float64), layer["group_size"], axis=1)
            for part in ("scales", "biases")
        )
        found[path] = value * scale + bias, np.abs(scale), (value == 0) | (value == 2 ** layer["bits"] - 1)
    return found


def dequantized_model(name: str, held: dict) -> onnx.ModelProto:
    """The fixture's graph with each weight that a layer quantized as the layer holds it; a layer may hold several, one
    below the other.
    """
    model = onnx.load(str(FIXTURES / name / "model.onnx"))
    left = {path: len(weight) for path, (weight, _, _) in held.items()}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        near = [
            (np.abs(part - turned).max(), path, is_turned, part)
            for is_turned, turned in enumerate((array, array.T) if array.ndim == 2 else ())
            for path, (weight, _, _) in held.items()
            for at in range(0, len(weight) - len(turned) + 1, 8)
            if (part := weight[at : at + len(turned)]).shape == turned.shape
        ]
        far, path, is_turned, part = min(near, key=lambda one: one[0], default=(np.inf, "", 0, array))
        if far < 0.5 * np.abs(array).max():
            new = (part.T if is_turned else part).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
            left[path] -= len(part)
    assert all(count <= 0 for count in left.values())  # a tied table may stand in the file twice
    return model


def onnxruntime_logits(model: onnx.ModelProto, ids: list[int]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    feed["position_ids"] = np.arange(len(ids))[None]
    given = {value.name: value for value in session.get_inputs()}
    for value in given.values():
        if "past" in value.name:
            feed[value.name] = np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
    return session.run(["logits"], {name: feed[name] for name in given})[0][0, -1]


def module_logits(folder: Path, ids: list[int]) -> np.ndarray:
    run = Decoder(load_folder(folder).decoder, 1).begin_session([len(ids)])
    logits = run.step(np.array([ids], np.int32), [len(ids)])
    run.evaluate(logits)
    return ops.to_host(logits[0])


# Weights and logits.


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("llama", {"bits": 4}), ("llama", {"bits": 8}), ("llama", {"recipe": "mixed_3_6"}), ("gemma", {"bits": 6}),
        ("gpt2", {"bits": 5}), ("bloom", {"bits": 3}), ("phi3", {"bits": 2}),
    ],
)  # fmt: skip
def test_the_weights_are_near_their_floats_and_the_logits_are_onnxruntimes_of_these_weights(
    name, wanted, tmp_path, monkeypatch
):
    original: dict[str, np.ndarray] = {}
    made = quantize.quantize_layers

    def seen(program, *args):
        original.update({name: tensor.read().astype(np.float64) for name, tensor in program.tensors.items()})
        return made(program, *args)

    monkeypatch.setattr(quantize, "quantize_layers", seen)
    folder = run(FIXTURES / name, tmp_path / "out", group_size=32, **wanted)
    held = floats(folder)
    for path, (weight, step, end) in held.items():
        far = np.abs(weight - original[f"{path}.weight"])
        assert (far <= np.where(end, 1, 0.5) * step * (1 + 1e-4)).all()
        assert (far > 0.4 * step).any()  # the bound is no wider than it must be
    ids = [17, 40, 33, 101, 64, 29, 87, 90]
    expected = onnxruntime_logits(dequantized_model(name, held), ids)
    assert np.abs(module_logits(folder, ids) - expected).max() <= 1e-4 * np.ptp(expected)


def test_it_is_what_mlx_makes_of_the_float_module(converted, tmp_path):
    """nn.quantize of the float conversion: the same arrays under the same names."""
    made = load_folder(run(FIXTURES / "gemma", tmp_path / "out", group_size=32)).decoder
    module = load_folder(converted("gemma")).decoder

    def whole(path, layer):
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0

    nn.quantize(module, group_size=32, bits=4, class_predicate=whole)
    wanted, found = dict(tree_flatten(module.parameters())), dict(tree_flatten(made.parameters()))
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(found[name], wanted[name]) for name in wanted)


def test_tied_weights_are_stored_once_and_a_layer_that_does_not_fit_stays(tmp_path):
    folder = run(FIXTURES / "gemma", tmp_path / "out", group_size=32)
    program = load_folder(folder).decoder.program
    tables = [path for path, layer in program.layers.items() if layer["kind"] == "QuantizedEmbedding"]
    assert len(tables) == 1
    assert [node.op for node in program.nodes if tables[0] in node.inputs] == ["mlx.embedding", "mlx.as_linear"]
    kept = program.metadata["quantization"]["kept"]
    assert set(kept) == {path for path, layer in program.layers.items() if layer["kind"] == "Linear"}
    assert set(kept.values()) == {"its 48 columns are no multiple of 32"}


def test_a_line_says_what_was_quantized_and_what_was_not(tmp_path, capsys):
    convert(
        FIXTURES / "llama",
        "model.onnx",
        tmp_path / "out",
        precision=PrecisionOptions(Quantization.of({"group_size": 32})),
    )
    line = "quantized 8 layers: 8 in 4 bits, groups of 32; 2 stay as they are (model.layers.0.mlp.down_proj): its 48"
    assert line in capsys.readouterr().err


def test_what_it_does_to_the_logits_is_recorded(tmp_path):
    found = {}
    for bits in (2, 4, 8):
        folder = run(FIXTURES / "llama", tmp_path / str(bits), bits=bits, group_size=32)
        meta = load_folder(folder).decoder.program.metadata
        assert meta["proof"]["error"] < 1e-4  # the float module's
        found[bits] = meta["quantization"]
        assert f"by up to {found[bits]['error']:.1e} of their spread" in (folder / "README.md").read_text()
    for what in ("error", "divergence"):
        assert 0 < found[8][what] < found[4][what] < found[2][what]
    # A second measure: the two folders side by side on other tokens.
    ids = [200, 199, 198, 180, 170]
    plain = module_logits(convert(FIXTURES / "llama", "model.onnx", tmp_path / "float", progress=False), ids)
    far = np.abs(module_logits(tmp_path / "8", ids) - plain).max() / np.ptp(plain)
    assert found[8]["error"] / 10 < far < found[8]["error"] * 10


def test_float16_weights_have_float16_scales(tmp_path):
    program = load_folder(run(FIXTURES / "llama_fp16", tmp_path / "out", group_size=32)).decoder.program
    assert program.weights["lm_head.scales"].dtype == "float16"
    assert {value.dtype for value in program.outputs} == {"float16"}


@settings(max_examples=60)
@given(
    st.sampled_from(QUANTIZATION_BITS), st.sampled_from(QUANTIZATION_GROUP_SIZES), st.sampled_from([mx.float32, mx.float16]),
    st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 300.0]), st.sampled_from([1e-4, 0.02, 1.0, 100.0]),
)  # fmt: skip
def test_the_bound_holds_for_all_weights_and_sees_a_wrong_one(bits, group, dtype, seed, offset, size):
    draw = np.random.default_rng(seed)
    weight = mx.array(draw.normal(offset, size, (3, 2 * group)).astype(np.float32)).astype(dtype)
    made = list(mx.quantize(weight, group_size=group, bits=bits))
    assert is_within_rounding_bound(weight, *made, bits)
    step = float(mx.abs(made[1][1, 1]).item())
    info = mx.finfo(dtype)  # what is below the smallest normal number is held to that number's precision
    rounding = float(info.eps) * (2**bits * max(step, float(info.smallest_normal)) + offset + 10 * size)
    far = 2.1 * step + 2 * rounding  # it may have been a step below
    wrong = np.array(weight.astype(mx.float32))
    wrong[1, group + 3] += far
    assert not is_within_rounding_bound(mx.array(wrong), *made, bits)


# What is refused.


def test_a_quantized_file_is_refused(tmp_path):
    from onnxruntime.quantization import quantize_dynamic

    with pytest.raises(ConvertError, match="quantized already"):
        run(FIXTURES / "llama_q4", tmp_path / "out")
    (tmp_path / "dynamic").mkdir()
    quantize_dynamic(FIXTURES / "llama" / "model.onnx", tmp_path / "dynamic" / "model.onnx")
    with pytest.raises(ConvertError, match="quantized already"):
        run(tmp_path / "dynamic", tmp_path / "out")


def test_a_model_of_which_no_layer_fits_is_refused(tmp_path):
    with pytest.raises(ConvertError, match=r"no layer that can be quantized in groups of 64.*its 8 columns"):
        run(toy.write(tmp_path / "source", toy.decoder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = onnx.load(str(FIXTURES / "llama" / "model.onnx"))
    table = next(tensor for tensor in model.graph.initializer if "embed_tokens" in tensor.name)
    array = numpy_helper.to_array(table).copy()
    array[-1, 3] = np.inf  # a row that the proof's prompts don't read
    table.CopyFrom(numpy_helper.from_array(array, table.name))
    toy.write(tmp_path / "source", model)
    with pytest.raises(ConvertError, match=r"model.embed_tokens.weight, which 4 bits in groups of 32 don't hold"):
        run(tmp_path / "source", tmp_path / "out", group_size=32)


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ("4bits", "quantize '4bits'; expected 2bit 3bit .* Did you mean 4bit"),
        ("7bit", "quantize '7bit'"),
        ("mixed_3_5", "Did you mean mixed_3_"),
        ({"recipe": "mixed3_6"}, "recipe 'mixed3_6'.*Did you mean mixed_3_6"),
        ({"bits": 7}, "bits 7; expected one of 2, 3, 4, 5, 6, 8"),
        ({"bits": "4"}, "bits '4'"),
        ({"group_size": 16}, "group_size 16; expected one of 32, 64, 128"),
        ({"group": 64}, "the key 'group'.*Did you mean group_size"),
        ({"bits": 4, "recipe": "mixed_3_6"}, "4 bits and the recipe mixed_3_6"),
    ],
)
def test_what_mlx_has_no_form_of_is_refused(wanted, match):
    with pytest.raises(PrecisionError, match=match):
        Quantization.of(wanted)


def test_names_and_mappings_say_the_same():
    assert Quantization.of("4bit") == Quantization.of({}) == Quantization.of({"bits": 4, "group_size": 64})
    assert (
        Quantization.of("mixed_2_6") == Quantization.of({"recipe": "mixed_2_6"}) == Quantization(2, 64, 6, "mixed_2_6")
    )
    assert [Quantization.of(name).name for name in QUANTIZATION_NAMES] == list(QUANTIZATION_NAMES)
