"""Variants of one decoder, each written as some exporter writes it: the same logits from the same number of nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import toy
from conftest import FIXTURES
from onnx import ModelProto, TensorProto, helper, numpy_helper

from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder

IDS = [3, 1, 15, 7, 7]


def constant_nodes(model: ModelProto) -> None:
    """Weights as nodes, as torch.onnx writes them without folding."""
    for one in model.graph.initializer:
        model.graph.node.insert(0, helper.make_node("Constant", [], [one.name], value=one))
    del model.graph.initializer[:]


def weights_through(kind: str, stored: Callable[[np.ndarray], TensorProto], **attrs) -> Callable[[ModelProto], None]:
    """Each weight is read through a node of that operator, whose input is what `stored` makes of the weight."""

    def change(model: ModelProto) -> None:
        for one in [t for t in model.graph.initializer if t.name in toy.weights()]:
            tensor = stored(numpy_helper.to_array(one))
            tensor.name = f"stored.{one.name}"
            model.graph.initializer.append(tensor)
            model.graph.node.insert(0, helper.make_node(kind, [tensor.name], [one.name], **attrs))
            model.graph.initializer.remove(one)

    return change


def shared_matrix(model: ModelProto) -> None:
    """One matrix for the products of two layers, the second time through an Identity."""
    model.graph.node.insert(0, helper.make_node("Identity", ["onnx::MatMul_1"], ["again"]))
    twice = helper.make_node("MatMul", ["x", "again"], ["x2"])
    model.graph.node.insert(list(model.graph.node).index(toy.node(model, "q")), twice)
    toy.node(model, "q").input[0] = "x2"


def opaque_names(model: ModelProto) -> None:
    """Values have the numbers that torch.jit gives them as names, and nodes have no names."""
    names = {one.name: f"onnx::MatMul_{i + 733}" for i, one in enumerate(model.graph.initializer)}
    rename_values(model, names | {node.output[0]: str(i) for i, node in enumerate(model.graph.node)})
    for node in model.graph.node:
        node.name = ""


def names_with_slashes(model: ModelProto) -> None:
    """Values are named as paths with spaces, colons and accents."""
    model.graph.name = "/a graph/"
    rename_values(model, {node.output[0]: f"/m/{node.output[0]}:0 (é)" for node in model.graph.node})


def rename_values(model: ModelProto, names: dict[str, str]) -> None:
    kept = {value.name for value in (*model.graph.input, *model.graph.output)}
    names = {old: new for old, new in names.items() if old not in kept}
    for one in model.graph.initializer:
        one.name = names.get(one.name, one.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def one_node_name(model: ModelProto) -> None:
    for node in model.graph.node:
        node.name = "node"


def initializers_among_inputs(model: ModelProto) -> None:
    """IR 3, which lists initializers among the inputs."""
    model.ir_version = 3
    for one in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(one.name, one.data_type, one.dims))


def reversed_nodes(model: ModelProto) -> None:
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(nodes[::-1])


def mask_as_function(model: ModelProto) -> None:
    """The mask is computed by a function of the model, which calls another one."""
    nodes = list(model.graph.node)
    begin, end = (next(i for i, n in enumerate(nodes) if name in n.output) for name in ("past_shape", "seen"))
    inner = helper.make_function("pkg", "seen", ["shown4", "causal"], ["seen"], [nodes[end]], model.opset_import)
    call = helper.make_node("seen", ["shown4", "causal"], ["seen"], domain="pkg")
    names = ["past_key_values.0.key", "attention_mask", "two", "one0", "zero0", "one", "heads"]
    imports = [*model.opset_import, helper.make_opsetid("pkg", 1)]
    outer = helper.make_function("pkg", "mask", names, ["seen"], [*nodes[begin:end], call], imports)
    model.functions.extend([inner, outer])
    model.opset_import.append(helper.make_opsetid("pkg", 1))
    del model.graph.node[begin : end + 1]
    model.graph.node.insert(begin, helper.make_node("mask", names, ["seen"], domain="pkg"))


def float16_weights(model: ModelProto) -> None:
    """Weights are stored in float16 and cast where they are used."""
    weights_through("Cast", lambda array: numpy_helper.from_array(array.astype(np.float16)), to=TensorProto.FLOAT)(
        model
    )


VARIANTS = {
    "weights as Constant nodes": constant_nodes,
    "weights behind Identity": weights_through("Identity", numpy_helper.from_array),
    "weights behind Transpose": weights_through("Transpose", lambda array: numpy_helper.from_array(array.T.copy())),
    "weights behind Cast": float16_weights,
    "a weight of two layers": shared_matrix,
    "opaque names": opaque_names,
    "names with slashes": names_with_slashes,
    "all nodes of one name": one_node_name,
    "initializers among the inputs": initializers_among_inputs,
    "nodes in no order": reversed_nodes,
    "functions of the model": mask_as_function,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("external", [False, True])
def test_a_variant_has_the_logits_and_the_number_of_nodes_of_the_plain_decoder(variant, external, tmp_path):
    plain = load_folder(
        convert(toy.write(tmp_path / "plain", toy.decoder()), "model.onnx", tmp_path / "p", progress=False)
    )
    model = toy.decoder()
    VARIANTS[variant](model)
    source = toy.write(tmp_path / "source", model, external=external and not variant.endswith(("nodes", "names")))
    if variant == "all nodes of one name":  # onnxruntime refuses the file, in which nothing is ambiguous
        wanted = toy.onnxruntime_logits(toy.decoder(), IDS)
    else:
        wanted = toy.onnxruntime_logits(source / "model.onnx", IDS)
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False)
    np.testing.assert_allclose(toy.converted_logits(folder, IDS), wanted, atol=1e-4)
    program = load_folder(folder).decoder.program
    extra = 1 if variant == "a weight of two layers" else 0
    assert len(program.nodes) == len(plain.decoder.program.nodes) + extra
    assert len(program.layers) == len(plain.decoder.program.layers)


@pytest.mark.parametrize("name", ["llama_dynamo", "gpt2_dynamo"])
def test_weights_folded_by_torch_onnx_get_the_names_of_their_modules(name):
    program = read_onnx(FIXTURES / name / "model.onnx")
    assert any(weight.startswith("val_") for weight in program.weights)
    module = (
        "decoder.model.layers.1.self_attn.q_proj" if name == "llama_dynamo" else "decoder.transformer.h.1.attn.c_attn"
    )
    names = {weight for weight in name_weights(program).weights if module in weight}
    assert names == ({f"{module}.weight"} if name == "llama_dynamo" else {f"{module}.weight", f"{module}.bias"})


def test_reading_a_model_reads_none_of_its_external_data(tmp_path, monkeypatch):
    """Weights lie past 2 GB of a sparse file of 3 GB; they are read when they are used."""
    model = toy.decoder()
    array = toy.initializer(model, "model.embed.weight")
    with open(tmp_path / "model.onnx_data_1", "wb") as file:
        file.truncate(3 * 2**30)
    toy.place(array, "model.onnx_data_1", 2**31 + 64, len(array.raw_data))
    array.ClearField("raw_data")
    toy.write(tmp_path, model)

    def refuse_to_read(*args, **kwargs):
        raise AssertionError("the data was read")

    monkeypatch.setattr(np, "memmap", refuse_to_read)
    program = read_onnx(tmp_path / "model.onnx")
    with pytest.raises(AssertionError, match="the data was read"):
        program.tensors["model.embed.weight"].read()


def test_reading_a_model_proto_does_not_change_it():
    """Inlining functions, too, is done in a copy."""
    model = toy.decoder()
    mask_as_function(model)
    model.graph.node.append(helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "position_ids"], ["loss"]))
    before = model.SerializeToString(deterministic=True)
    read_onnx(model)
    assert model.SerializeToString(deterministic=True) == before
