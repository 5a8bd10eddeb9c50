"""Weights in integers become quantized layers, and rounded activations floats where asked: onnxruntime's logits."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES
from onnx import TensorProto, helper, numpy_helper
from toy_products import with_floats, with_product

from mlx_transmuter import ops
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.graph.rewriting import apply_rewrite
from mlx_transmuter.converters.onnx_reader.lazy_tensor import LazyTensor
from mlx_transmuter.converters.passes.layers.dequantize_linear import absorb_dequantize_linear
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import PrecisionOptions
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.runtime.decoder import Decoder

IDS = [3, 1, 15, 7, 2]
PACKED = {"int4": (TensorProto.INT4, -8, 7), "uint4": (TensorProto.UINT4, 0, 15)}
BYTES = {"int8": (TensorProto.INT8, -128, 127), "uint8": (TensorProto.UINT8, 0, 255)}


def converted(model: onnx.ModelProto, tmp_path: Path, **changes) -> tuple[np.ndarray, Program]:
    source = toy.write(tmp_path / "source", model)
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False, precision=PrecisionOptions(**changes))
    return toy.converted_logits(folder, IDS), load_folder(folder).decoder.program


def kinds(program: Program) -> list[str]:
    return [layer["kind"] for path, layer in program.layers.items() if path.startswith("down")]


def toy_with_dequantize_linear(kind: str, form: str, transposed: bool, columns: int = 64, block: int = 32):
    """A toy with MatMul(wide, DequantizeLinear(W)), and its weight in floats [columns, 8]."""
    code, low, high = {**PACKED, **BYTES}[kind]
    draw = np.random.default_rng(0)
    shape = (toy.DIM, columns) if transposed else (columns, toy.DIM)
    values = draw.integers(low, high, shape, endpoint=True)
    along = 1 if transposed else 0
    attrs, sizes = {"tensor": ({}, ()), "channel": ({"axis": 1 - along}, (toy.DIM,)), "blocks": (
        {"axis": along, "block_size": block}, (toy.DIM, columns // block) if transposed else (columns // block, toy.DIM),
    )}[form]  # fmt: skip
    scale = draw.uniform(0.5, 1.5, sizes).astype(np.float32) / (high - low)
    zero = draw.integers(low, high, sizes, endpoint=True)

    def spread(part: np.ndarray) -> np.ndarray:
        if form == "blocks":
            return np.repeat(part, block, axis=along)
        return part[:, None] if form == "channel" and transposed else part

    weight = (values - spread(zero)) * spread(scale)
    read = helper.make_node("DequantizeLinear", ["down.weight", "down.scales", "down.zeros"], ["floats"], **attrs)
    nodes = [read, helper.make_node("MatMul", ["wide", "floats"], ["narrow"], "/down/MatMul")]
    if transposed:
        nodes.insert(1, helper.make_node("Transpose", ["floats"], ["floats_t"], perm=[1, 0]))
        nodes[2].input[1] = "floats_t"
    model = with_product(nodes, {"down.scales": np.asarray(scale)}, columns)
    for name, array in (("down.weight", values), ("down.zeros", np.asarray(zero))):
        model.graph.initializer.append(helper.make_tensor(name, code, array.shape, array.ravel().tolist()))
    return model, (weight.T if transposed else weight)


@pytest.mark.parametrize("kind", [*PACKED, *BYTES])
@pytest.mark.parametrize("form", ["tensor", "channel", "blocks"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_in_integers_becomes_a_quantized_layer(kind, form, transposed, tmp_path):
    model, weight = toy_with_dequantize_linear(kind, form, transposed)
    actual, program = converted(model, tmp_path)
    assert kinds(program) == ["QuantizedLinear"]
    assert not [node for node in program.nodes if "Dequantize" in node.op]
    for expected in (toy.onnxruntime_logits(model, IDS), toy.onnxruntime_logits(with_floats(weight, 64), IDS)):
        assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


def test_blocks_that_mlx_has_no_groups_for_become_floats(tmp_path):
    model, _ = toy_with_dequantize_linear("int8", "blocks", False, block=16)
    actual, program = converted(model, tmp_path)
    assert kinds(program) == ["Linear"]
    expected = toy.onnxruntime_logits(model, IDS)
    assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


def test_a_weight_whose_zero_point_the_graph_computes_stays():
    """Its floats are known only when the graph runs."""
    tensors = {"w": LazyTensor("int8", (2, 3), lambda: np.ones((2, 3), np.int8))}
    nodes = [Node("DequantizeLinear-13", ("w", "scale", "zero"), ("floats",)), Node("Abs-6", ("floats",), ("y",))]
    inputs, outputs = (Value("zero", "int8", None),), (Value("y", "float32", None),)
    program = Program(inputs, outputs, nodes, {"scale": np.array(0.5, np.float32)}).with_tensors(tensors)
    rewritten, record = apply_rewrite(program, absorb_dequantize_linear)
    assert (record.replaced_count, [node.op for node in rewritten.nodes]) == (0, ["DequantizeLinear-13", "Abs-6"])


# Dynamic files.


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    run = Decoder(load_folder(folder).decoder, 1).begin_session([ids.shape[1]])
    step = run.step(ids.astype(np.int32), [ids.shape[1]])
    run.evaluate(step)
    return ops.to_host(step[0])


def onnxruntime_logits(file: Path, ids: np.ndarray) -> np.ndarray:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    feed["use_cache_branch"] = np.array([False])
    inputs = session.get_inputs()
    feed |= {v.name: np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32) for v in inputs if "past" in v.name}
    return session.run(["logits"], {v.name: feed[v.name] for v in inputs})[0][0, -1]


def dynamically_quantized(name: str, folder: Path, **options) -> Path:
    from onnxruntime.quantization import quantize_dynamic

    shutil.copytree(FIXTURES / name, folder)
    (folder / "model.onnx").unlink()
    quantize_dynamic(FIXTURES / name / "model.onnx", folder / "model.onnx", **options)
    return folder


def in_floats(file: Path) -> onnx.ModelProto:
    """The dynamic file with products of floats for those of integers: weights dequantized, activations not rounded."""
    model = onnx.load(str(file))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    readers = {name: node for node in model.graph.node for name in node.input}
    removed = []
    for node in [node for node in model.graph.node if node.op_type == "MatMulInteger"]:
        source, cast = producers[node.input[0]], readers[node.output[0]]
        scaled = readers[cast.output[0]]
        scales = producers[next(name for name in scaled.input if name != cast.output[0])]
        scale = arrays[next(name for name in scales.input if name in arrays)]
        weight = (arrays[node.input[1]].astype(np.float32) - arrays[node.input[3]].astype(np.float32)) * scale
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), f"{node.name}.floats"))
        product = helper.make_node("MatMul", [source.input[0], f"{node.name}.floats"], [scaled.output[0]])
        model.graph.node.insert(list(model.graph.node).index(scaled), product)
        removed += [node, cast, scaled]
    for node in removed:
        model.graph.node.remove(node)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_dynamic_file_with_float_activations_has_quantized_layers(name, per_channel, tmp_path):
    from onnxruntime.quantization import QuantType

    source = dynamically_quantized(name, tmp_path / "source", weight_type=QuantType.QInt8, per_channel=per_channel)
    changes = PrecisionOptions(float_activations=True)
    out = convert(source, "model.onnx", tmp_path / "out", progress=False, precision=changes)
    program = load_folder(out).decoder.program
    assert not [node for node in program.nodes if "Quantize" in node.op or "Integer" in node.op]
    assert {layer["bits"] for layer in program.layers.values() if "bits" in layer} == {8}
    assert program.metadata["proof"]["limit"] == 1e-4
    ids = np.random.default_rng(0).integers(30, 120, (1, 8))
    onnx.save(in_floats(source / "model.onnx"), str(tmp_path / "floats.onnx"))
    expected, rounded = (onnxruntime_logits(file, ids) for file in (tmp_path / "floats.onnx", source / "model.onnx"))
    actual = logits(out, ids)
    assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)
    # The effect that the conversion recorded is about as large as that of onnxruntime's rounding.
    recorded = program.metadata["float_activations"]
    error = np.abs(actual - rounded).max() / np.ptp(rounded)
    assert error / 10 < recorded["error"] < error * 10
    assert f"by up to {recorded['error']:.1e} of their range" in (out / "README.md").read_text()


def test_a_merged_dynamic_file_can_keep_activations_in_float(tmp_path):
    """As transformers.js exports them: the products of rounded activations are inside the branches."""
    source = dynamically_quantized("gpt2_merged", tmp_path / "source", extra_options={"EnableSubgraph": True})
    changes = PrecisionOptions(float_activations=True)
    out = convert(source, "model.onnx", tmp_path / "out", progress=False, precision=changes)
    program = load_folder(out).decoder.program
    assert not [node for node in program.nodes if "Quantize" in node.op or "Integer" in node.op]
    assert {layer["bits"] for layer in program.layers.values() if "bits" in layer} == {8}
    assert (program.metadata["branch"], program.metadata["proof"]["limit"]) == ("cached", 1e-4)
    ids = np.random.default_rng(0).integers(30, 120, (1, 8))
    rounded, actual = onnxruntime_logits(source / "model.onnx", ids), logits(out, ids)
    error = np.abs(actual - rounded).max() / np.ptp(rounded)
    assert error <= 5e-2
    assert error / 10 < program.metadata["float_activations"]["error"] < error * 10


def test_a_merged_dynamic_file_whose_branches_differ_is_refused(tmp_path):
    source = dynamically_quantized("gpt2_merged", tmp_path / "source", extra_options={"EnableSubgraph": True})
    model = onnx.load(str(source / "model.onnx"))
    branches = next(node for node in model.graph.node if node.op_type == "If")
    cached = next(attribute.g for attribute in branches.attribute if attribute.name == "then_branch")
    output = cached.output[0].name
    producer = next(node for node in cached.node if output in node.output)
    producer.output[list(producer.output).index(output)] = "before"
    cached.node.append(helper.make_node("Neg", ["before"], [output]))
    onnx.save(model, str(source / "model.onnx"))
    with pytest.raises(ConvertError, match=r"two branches on 'use_cache_branch'.*range"):
        convert(
            source, "model.onnx", tmp_path / "out", progress=False, precision=PrecisionOptions(float_activations=True)
        )


def test_without_the_option_a_dynamic_file_keeps_its_integers(tmp_path):
    source = dynamically_quantized("llama", tmp_path / "source")
    program = load_folder(convert(source, "model.onnx", tmp_path / "out", progress=False)).decoder.program
    assert [node for node in program.nodes if node.op.startswith("MatMulInteger-")]
    assert "float_activations" not in program.metadata


def test_float_activations_of_a_float_file_are_refused(tmp_path):
    with pytest.raises(ConvertError, match=r"no activations rounded to 8 bits"):
        convert(
            FIXTURES / "llama",
            "model.onnx",
            tmp_path / "out",
            progress=False,
            precision=PrecisionOptions(float_activations=True),
        )


@pytest.mark.parametrize("fused", ["DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
@pytest.mark.parametrize("signed", [False, True])
def test_the_fused_products_of_onnxruntime_become_quantized_layers(fused, signed, tmp_path):
    draw = np.random.default_rng(0)
    kind = np.int8 if signed else np.uint8
    values = draw.integers(np.iinfo(kind).min, np.iinfo(kind).max, (64, toy.DIM)).astype(kind)
    scale = draw.uniform(0.5, 1.5, toy.DIM).astype(np.float32) / 255
    zero, bias = np.full(toy.DIM, 3, kind), draw.normal(size=toy.DIM).astype(np.float32)
    arrays = {"down.weight": values, "down.scales": scale, "down.zeros": zero, "down.offset": bias}
    domain = {"domain": "com.microsoft", "name": "/down/MatMul"}
    if fused == "DynamicQuantizeMatMul":
        inputs = ["wide", "down.weight", "down.scales", "down.zeros", "down.offset"]
        nodes = [helper.make_node(fused, inputs, ["narrow"], **domain)]
    else:
        inputs = ["wide_q", "down.weight", "wide_s", "down.scales", "wide_z", "down.zeros", "down.offset"]
        nodes = [helper.make_node("DynamicQuantizeLinear", ["wide"], ["wide_q", "wide_s", "wide_z"])]
        nodes.append(helper.make_node(fused, inputs, ["narrow"], **domain))
    model = with_product(nodes, arrays, 64)
    actual, program = converted(model, tmp_path, float_activations=True)
    assert kinds(program) == ["QuantizedLinear"]
    weight = (values.astype(np.float32) - zero.astype(np.float32)) * scale
    expected = toy.onnxruntime_logits(with_floats(weight, 64, bias), IDS)
    assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


# QDQ files.


class Prompts:
    """Calibration data for onnxruntime's static quantization."""

    def __init__(self, inputs):
        draw = np.random.default_rng(1)
        self.left = []
        for _ in range(3):
            ids = draw.integers(30, 120, (1, 8))
            feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(8)[None]}
            feed |= {v.name: np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32) for v in inputs if "past" in v.name}
            self.left.append({v.name: feed[v.name] for v in inputs})

    def get_next(self):
        return self.left.pop() if self.left else None

    def __iter__(self):
        return iter(())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_static_qdq_file_keeps_its_roundings_or_drops_them_where_asked(name, per_channel, tmp_path):
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    CalibrationDataReader.register(Prompts)
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / name, source)
    inputs = ort.InferenceSession(str(source / "model.onnx"), providers=["CPUExecutionProvider"]).get_inputs()
    (source / "model.onnx").unlink()
    quantize_static(
        str(FIXTURES / name / "model.onnx"), str(source / "model.onnx"), Prompts(inputs), quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul", "Gemm"], per_channel=per_channel, weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(30, 120, (1, 8))
    expected = onnxruntime_logits(source / "model.onnx", ids)
    plain = onnxruntime_logits(FIXTURES / name / "model.onnx", ids)
    kept = convert(source, "model.onnx", tmp_path / "kept", progress=False)
    program = load_folder(kept).decoder.program
    assert [node for node in program.nodes if node.op.startswith("QuantizeLinear-")]
    assert [layer for layer in program.layers.values() if layer["kind"] == "QuantizedLinear"]
    actual = logits(kept, ids)
    assert np.abs(actual - expected).max() <= 5e-2 * np.ptp(
        expected
    )  # a value that rounds the other way moves by 1/255
    floats = convert(
        source, "model.onnx", tmp_path / "floats", progress=False, precision=PrecisionOptions(float_activations=True)
    )
    program = load_folder(floats).decoder.program
    assert not [node for node in program.nodes if node.op.startswith("QuantizeLinear-")]
    # Without the roundings the conversion is closer to the float model than the file is.
    assert np.abs(logits(floats, ids) - plain).max() < np.abs(expected - plain).max()
