"""com.microsoft's mixtures of experts in one operator become stacks of experts: compared with onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import toy
from onnx import ModelProto, helper, numpy_helper

from mlx_transmuter.converters.graph.graph_view import GraphView
from mlx_transmuter.converters.graph.rewriting import SkippedMatch
from mlx_transmuter.converters.graph.shape_probe import ShapeProbe
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.passes.moe.contrib_moe import expand_contrib_moe
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import PrecisionOptions, Quantization
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.decoder import Decoder

EXPERTS, K, WIDTH, INNER = 6, 2, 64, 32
IDS = np.random.default_rng(0).integers(0, toy.VOCAB, 48).tolist()


def drawn(name: str, *shape: int) -> np.ndarray:
    draw = np.random.default_rng(sum(map(ord, name)))
    return (draw.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)


def decoder(op: str, arrays: dict[int, np.ndarray], **attrs) -> ModelProto:
    """The toy with a MoE or QMoE after its embedding. arrays: inputs of the operator from 2 on, by number."""
    weights = {f"experts.input_{i}": array for i, array in arrays.items()}
    weights |= {"wide": drawn("wide", toy.DIM, WIDTH) * 3, "narrow": drawn("narrow", WIDTH, toy.DIM)}
    weights |= {"router": drawn("router", WIDTH, EXPERTS) * 3, "flat": np.array([-1, EXPERTS])}
    names = ["wide_x", "logits_2d", *[f"experts.input_{i}" if i in arrays else "" for i in range(2, max(arrays) + 1)]]
    model = toy.embedding(
        toy.decoder(),
        helper.make_node("MatMul", ["embedded", "wide"], ["wide_x"]),
        helper.make_node("MatMul", ["wide_x", "router"], ["logits_3d"]),
        helper.make_node("Reshape", ["logits_3d", "flat"], ["logits_2d"]),
        helper.make_node(op, names, ["summed"], name="/experts/Moe", domain="com.microsoft", k=K, **attrs),
        helper.make_node("MatMul", ["summed", "narrow"], ["embedded2"]),
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def agrees(model: ModelProto, tmp_path: Path, truth: ModelProto | None = None) -> Program:
    """The converted program. Its logits are those of onnxruntime for `truth`, one token a step and all at once."""
    folder = convert(toy.write(tmp_path / "source", model), "model.onnx", tmp_path / "out", progress=False)
    module = load_folder(folder).decoder
    run = Decoder(module, 1).begin_session([len(IDS)])
    logits = run.step(np.array([IDS], np.int32), [len(IDS)])
    run.evaluate(logits)
    expected = toy.onnxruntime_logits(truth or model, IDS)
    np.testing.assert_allclose(np.array(logits[0]), expected, atol=2e-5 * np.ptp(expected))
    expected = toy.onnxruntime_logits(truth or model, IDS[:5])
    np.testing.assert_allclose(toy.converted_logits(folder, IDS[:5]), expected, atol=2e-5 * np.ptp(expected))
    assert not [node for node in module.program.nodes if node.op.startswith("com.microsoft.")]
    return module.program


def dense(fused: bool, bias: bool) -> dict[int, np.ndarray]:
    inner = 2 * INNER if fused else INNER
    weights = {2: drawn("fc1", EXPERTS, inner, WIDTH), 4: drawn("fc2", EXPERTS, WIDTH, INNER)}
    return weights | ({3: drawn("b1", EXPERTS, inner), 5: drawn("b2", EXPERTS, WIDTH)} if bias else {})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "attrs"),
    [
        ("relu", {}),
        ("gelu", {"normalize_routing_weights": 1}),
        ("swiglu", {"swiglu_fusion": 1, "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 1.5}),
    ],
)
def test_a_mixture_in_floats(activation, attrs, bias, tmp_path):
    model = decoder("MoE", dense(activation == "swiglu", bias), activation_type=activation, **attrs)
    program = agrees(model, tmp_path)
    stacks = [layer for layer in program.layers.values() if layer["kind"] == "SwitchLinear"]
    assert stacks == [{"kind": "SwitchLinear", "bias": bias}] * 2


def test_a_mixture_in_floats_can_be_quantized_by_the_conversion(tmp_path):
    source = toy.write(tmp_path / "source", decoder("MoE", dense(False, True)))
    how = PrecisionOptions(Quantization(8, 32, 8))
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False, precision=how)
    layers = load_folder(folder).decoder.program.layers.values()
    assert [layer["kind"] for layer in layers].count("QuantizedSwitchLinear") == 2


def packed_weights(name: str, rows: int, columns: int, bits: int, block: int | None, zeros: bool) -> list:
    """Weights, scales and zero points as com.microsoft packs them, and the weights in floats."""
    draw = np.random.default_rng(sum(map(ord, name)))
    blocks = columns // block if block else 1
    scales = draw.uniform(0.5, 1.5, (EXPERTS, rows, blocks)).astype(np.float32) / 2**bits / 3

    def pack(values: np.ndarray) -> np.ndarray:
        lanes = values.astype(np.uint8).reshape(*values.shape[:-1], -1, 8 // bits)
        shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
        return np.bitwise_or.reduce(lanes << shifts, axis=-1).astype(np.uint8)

    weight, zero = (draw.integers(0, 2**bits, (EXPERTS, rows, count)) for count in (columns, blocks))
    middle = zero if zeros else np.full(zero.shape, 2 ** (bits - 1))
    size = columns // blocks
    floats = (weight - np.repeat(middle, size, -1)).astype(np.float32) * np.repeat(scales, size, -1)
    scales, zero = (scales, zero) if block else (scales[..., 0], zero[..., 0])
    return [pack(weight), scales, pack(zero) if zeros else None, floats]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("block", "kind"), [(32, "QuantizedSwitchLinear"), (16, "SwitchLinear"), (None, "QuantizedSwitchLinear")]
)
def test_a_quantized_mixture(block, kind, zeros, bits, tmp_path):
    """MLX has no groups of 16: such weights become floats. A scale of a whole row is repeated for each of its groups."""
    inner = 2 * INNER  # two blocks of 32 in each row, and so whole bytes of zero points
    first, second = (
        packed_weights("fc1", inner, WIDTH, bits, block, zeros),
        packed_weights("fc2", WIDTH, inner, bits, block, zeros),
    )
    arrays = {2: first[0], 3: first[1], 4: drawn("b1", EXPERTS, inner), 5: second[0], 6: second[1]}
    arrays |= {11: first[2], 12: second[2]} if zeros else {}
    attrs = {"expert_weight_bits": bits, "weights_prepacked": 0, "accuracy_level": 1}
    attrs |= {"block_size": block} if block else {}
    # onnxruntime rounds activations to 8 bits for 8-bit blocks, whatever the accuracy level; not in its MoE.
    floats = {2: first[3], 3: arrays[4], 4: second[3]}
    truth = decoder("MoE", floats, activation_type="silu", normalize_routing_weights=1) if bits == 8 and block else None
    program = agrees(decoder("QMoE", arrays, activation_type="silu", **attrs), tmp_path, truth)
    layers = [layer for layer in program.layers.values() if "Switch" in layer["kind"]]
    assert [(layer["kind"], layer["bias"]) for layer in layers] == [(kind, True), (kind, False)]
    assert {layer.get("bits") for layer in layers} == {bits if kind.startswith("Quantized") else None}


def test_a_sparse_mixer_is_skipped(tmp_path):
    source = toy.write(tmp_path / "source", decoder("MoE", dense(False, False)))
    program = read_onnx(source / "model.onnx")
    for node in program.nodes:
        if node.op == "com.microsoft.MoE-1":
            node.attrs["use_sparse_mixer"] = 1  # type: ignore[index]
    assert [match.reason for match in expand_contrib_moe(GraphView(program)) if isinstance(match, SkippedMatch)] == [
        "its router is a sparse mixer; expected the k best of a softmax"
    ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mixture_in_a_half_type(dtype, tmp_path):
    """Scores stay in float32, and their sums are cast to the type of the rows."""
    model = decoder("MoE", dense(False, True), activation_type="silu")
    source = toy.write(tmp_path / "source", model)
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False, precision=PrecisionOptions(dtype=dtype))
    program = load_folder(folder).decoder.program
    probe = ShapeProbe.run(program)
    assert probe is not None
    for node in program.nodes:
        if node.op.startswith("mlx.") and node.op not in ("mlx.router", "mlx.dispatch", "mlx.combine"):
            assert probe.dtype(node.outputs[0]) == dtype, node
    expected = toy.onnxruntime_logits(model, IDS[:5])
    limit = 2e-2 if dtype == "float16" else 8e-2
    np.testing.assert_allclose(toy.converted_logits(folder, IDS[:5]), expected, atol=limit * np.ptp(expected))
