"""Mixtures that run only the chosen experts: their spellings, quantized and half types, and near misses."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import toy
import toy_mixtures as mixtures

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import PrecisionOptions, Quantization
from mlx_transmuter.program import Program
from mlx_transmuter.runtime.decoder import Decoder

IDS = [3, 14, 7, 7, 0, 11, 2, 9, 15, 4]


def converted(model, tmp_path, **changes) -> tuple[Program, Path]:
    """The program of the toy's conversion, and its folder."""
    toy.write(tmp_path / "source", model)
    folder = convert(
        tmp_path / "source", "model.onnx", tmp_path / "out", progress=False, precision=PrecisionOptions(**changes)
    )
    return load_folder(folder).decoder.program, folder


def record(program: Program) -> dict:
    return next(entry for entry in program.metadata["rewrites"] if entry["name"] == "make_switch_experts")


@pytest.mark.parametrize("spelling", mixtures.SPELLINGS)
def test_every_spelling_becomes_stacks_of_experts(spelling, tmp_path):
    model = mixtures.decoder(spelling)
    program, folder = converted(model, tmp_path)
    assert (record(program)["held"], record(program)["declined"]) == (1, {})
    stacks = {path: layer["kind"] for path, layer in program.layers.items() if layer["kind"] == "SwitchLinear"}
    assert len(stacks) == 2
    assert all(program.weights[f"{path}.weight"].shape[0] == mixtures.EXPERTS for path in stacks)
    # onnxruntime runs a traced graph only where all experts are chosen; its truth is the same loop over all experts.
    truth = mixtures.decoder("gathered") if spelling == "traced" else model
    expected = toy.onnxruntime_logits(truth, IDS)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=1e-5 * np.ptp(expected))


def test_two_mixtures_of_one_scope_have_layers_of_their_own(tmp_path):
    """Their experts are numbered on from one mixture to the other, so that without the numbers all have one path."""
    model = mixtures.decoder("weighed", mixtures=2)
    program, folder = converted(model, tmp_path)
    assert (record(program)["held"], record(program)["declined"]) == (2, {})
    stacks = [path for path, layer in program.layers.items() if layer["kind"] == "SwitchLinear"]
    assert sorted(stacks) == [
        "experts.down_proj", "experts.down_proj_experts", "experts.gate_up_proj", "experts.gate_up_proj_experts",
    ]  # fmt: skip
    expected = toy.onnxruntime_logits(model, IDS)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=1e-5 * np.ptp(expected))


def in_one_step(folder, ids: list[int]) -> np.ndarray:
    """The converted folder's logits [vocab] after all ids in one step."""
    run = Decoder(load_folder(folder).decoder, 1).begin_session([len(ids)])
    logits = run.step(np.array([ids], np.int32), [len(ids)])
    run.evaluate(logits)
    return np.array(logits[0])


def test_the_choices_of_a_long_prompt_are_sorted(tmp_path):
    model, ids = mixtures.decoder("gathered"), np.random.default_rng(0).integers(0, toy.VOCAB, 64).tolist()
    _, folder = converted(model, tmp_path)
    expected = toy.onnxruntime_logits(model, ids)
    np.testing.assert_allclose(in_one_step(folder, ids), expected, atol=1e-5 * np.ptp(expected))


def test_a_token_reads_only_the_chosen_experts(tmp_path, monkeypatch):
    """Two products with the stacks, of k experts each, in place of two products of each expert."""
    _, folder = converted(mixtures.decoder("gathered", experts=9, k=3), tmp_path)
    chosen, products, gather_mm = [], [], mx.gather_mm
    decoder = load_folder(folder).decoder

    def counting_gather_mm(x, stack, rhs_indices, **options):
        chosen.append((rhs_indices.size, stack.shape[0]))
        return gather_mm(x, stack, rhs_indices=rhs_indices, **options)

    monkeypatch.setattr(mx, "gather_mm", counting_gather_mm)
    for node in decoder.program.nodes:
        products += [node.op] if node.op in ("mlx.linear", "mlx.switch_linear") else []
    run = Decoder(decoder, 1).begin_session([1])
    run.evaluate(run.step(np.array([[3]], np.int32), [1]))
    assert chosen == [(3, 9), (3, 9)]
    # The other products: into and out of the mixture, the router, the attention's query and the head.
    assert (products.count("mlx.switch_linear"), products.count("mlx.linear")) == (2, 5)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_stacks_hold_the_quantized_weights_of_each_expert(bits, tmp_path):
    """The weights are those of mx.quantize for each expert, and the logits those of the graph with these weights."""
    model = mixtures.decoder("gathered")
    how = Quantization(bits, 32, bits)
    program, folder = converted(model, tmp_path, quantize=how)
    path = next(path for path in program.layers if path.endswith("experts.down_proj"))
    assert program.layers[path] == {"kind": "QuantizedSwitchLinear", "bias": False, "bits": bits, "group_size": 32}
    saved = mx.load(str(folder / "model.safetensors"))
    for name in [initializer.name for initializer in model.graph.initializer]:
        tensor = toy.initializer(model, name)
        weight = np.array(toy.numpy_helper.to_array(tensor))
        if not name.endswith(".weight") or weight.shape[0] % 32 or name == "model.embed.weight":
            continue
        parts = mx.quantize(mx.array(weight.T), 32, bits)
        if name.startswith("experts.") and "down" in name:
            e = int(name.split(".")[1])
            for part, expected in zip(("weight", "scales", "biases"), parts, strict=True):
                np.testing.assert_array_equal(np.array(saved[f"{path}.{part}"][e]), np.array(expected))
        toy.replace(model, name, toy.numpy_helper.from_array(np.array(mx.dequantize(*parts, 32, bits)).T.copy()))
    expected = toy.onnxruntime_logits(model, IDS)
    for logits in (toy.converted_logits(folder, IDS), in_one_step(folder, IDS)):
        np.testing.assert_allclose(logits, expected, atol=2e-5 * np.ptp(expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stacks_in_half_types(dtype, tmp_path):
    model = mixtures.decoder("gathered")
    program, folder = converted(model, tmp_path, dtype=dtype)
    stacks = [path for path, layer in program.layers.items() if layer["kind"] == "SwitchLinear"]
    assert {program.weights[f"{path}.weight"].dtype for path in stacks} == {dtype}
    expected = toy.onnxruntime_logits(model, IDS)
    limit = 3e-2 if dtype == "float16" else 1e-1
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=limit * np.ptp(expected))


# Changes of an expert's output after which the sum is not that of the chosen experts by the router's scores.
CHANGES = {
    "one counts twice": lambda e, y, n: n("Mul", y, np.array(2, np.float32)) if e == 1 else y,
    "all are squared": lambda e, y, n: n("Mul", y, y),
}


@pytest.mark.parametrize("change", CHANGES)
def test_experts_whose_outputs_are_changed_before_the_sum_are_skipped(change, tmp_path):
    model = mixtures.decoder("weighed", change=CHANGES[change])
    program, folder = converted(model, tmp_path)
    assert record(program) == {
        "name": "make_switch_experts",
        "held": 0,
        "declined": {"its 5 experts are not added up by a router's indices and scores": 1},
    }
    expected = toy.onnxruntime_logits(model, IDS)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=1e-5 * np.ptp(expected))


def test_scores_that_depend_on_more_than_the_choices_are_skipped(tmp_path):
    """A weight of its own for each token and expert."""
    model = mixtures.decoder("weighed", change=lambda e, y, n: n("Mul", y, n("Sigmoid", "mixture.Reshape_1_0")))
    program, _ = converted(model, tmp_path)
    reason = "no router's indices and scores alone decide how its 5 experts are added up"
    assert list(record(program)["declined"]) == [reason]


def test_a_sum_of_another_shape_than_its_rows_is_skipped(tmp_path):
    """[1, tokens, width] of [tokens, width], read by a node other than a Reshape."""

    def change(e, y, n):
        return n("Unsqueeze", y, [0]) if e is not None else n("Tanh", y)

    model = mixtures.decoder("weighed", change=change)
    program, _ = converted(model, tmp_path)
    assert list(record(program)["declined"]) == ["the sum has another shape than what the experts read"]


@pytest.mark.parametrize("place", [0, None])
def test_a_shared_expert_of_the_same_structure_is_not_among_the_chosen(place, tmp_path):
    """It has a gate of its own, and comes before the other experts or after them."""
    shared = []

    def change(e, y, n):
        if e == place:
            x = "mixture.Reshape_1_0"
            gate, up = (n("MatMul", x, n.weight(f"shared.{part}.weight", 64, 32)) for part in ("gate", "up"))
            inner = n("Mul", n("Mul", gate, n("Sigmoid", gate)), up)
            down = n("MatMul", inner, n.weight("shared.down.weight", 32, 64))
            shared.append(n("Mul", down, n("Sigmoid", n("MatMul", x, n.weight("weight_of_shared.weight", 64, 1)))))
            if e == 0:  # its nine nodes come before the expert's six
                n.nodes[:] = n.nodes[:-15] + n.nodes[-9:] + n.nodes[-15:-9]
        return n("Add", y, shared[0]) if e is None else y

    model = mixtures.decoder("weighed", change=change)
    program, folder = converted(model, tmp_path)
    assert (record(program)["held"], record(program)["declined"]) == (1, {})
    assert sorted(program.weights[f"{path}.weight"].shape[0] for path in program.layers if "experts" in path) == [5, 5]
    expected = toy.onnxruntime_logits(model, IDS)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=1e-5 * np.ptp(expected))


def test_the_first_of_experts_with_equal_logits_is_chosen(tmp_path):
    """As in onnxruntime's TopK: four of five experts tie for every token, and two of the five are chosen."""
    model = mixtures.decoder("gathered")
    router = np.array(toy.numpy_helper.to_array(toy.initializer(model, "router.weight")))
    router[:, 1:] = router[:, 1:2]
    toy.replace(model, "router.weight", toy.numpy_helper.from_array(router))
    program, folder = converted(model, tmp_path)
    assert record(program)["held"] == 1
    for ids in (IDS, IDS * 5):
        expected = toy.onnxruntime_logits(model, ids)
        np.testing.assert_allclose(in_one_step(folder, ids), expected, atol=1e-5 * np.ptp(expected))


def test_experts_without_names(tmp_path):
    """Weights that tools have numbered, and nodes without names: a stack is named after the first expert's weight."""
    model = mixtures.decoder("gathered")
    for i, tensor in enumerate(model.graph.initializer):
        if tensor.name.startswith("experts."):
            reader = next(node for node in model.graph.node if tensor.name in node.input)
            tensor.name = reader.input[1] = f"MatMul_{i}_quant"
            reader.name = ""
    program, folder = converted(model, tmp_path)
    assert record(program)["held"] == 1
    stacks = [path for path, layer in program.layers.items() if layer["kind"] == "SwitchLinear"]
    assert len(stacks) == 2
    expected = toy.onnxruntime_logits(model, IDS)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), expected, atol=1e-5 * np.ptp(expected))
