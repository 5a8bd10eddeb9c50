"""Mixed recipes: the layers that get more bits are those of mlx_lm's predicate, without reading their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import FIXTURES

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.onnx_reader.reader import read_onnx
from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
from mlx_transmuter.converters.passes import GRAPH_REWRITES, POOL_REWRITES, apply_rewrites
from mlx_transmuter.converters.passes.layers.merge_projections import merge_projections
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.precision.recipes import recipe_bits
from mlx_transmuter.model import load_folder
from mlx_transmuter.precision_options import QUANTIZATION_RECIPES, PrecisionOptions, Quantization
from mlx_transmuter.program import Node, Program, Value
from mlx_transmuter.program.signature import outputs

NAMED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "smollm3",
    "granite",
    "phi3",
    "qwen3_moe",
)


def mlx_lm_bits(recipe: str, paths: list[str], blocks: int) -> dict[str, int]:
    """mlx_lm 0.32.2, convert.mixed_quant_predicate_builder: path -> bits of the layers with more than the fewest."""
    _, high_bits = QUANTIZATION_RECIPES[recipe]
    down = next(path for path in paths if "down_proj" in path)
    layer_location = next(i for i, part in enumerate(down.split(".")) if part.isdigit())
    bits = {}
    for path in paths:
        parts = path.split(".")
        index = int(parts[layer_location]) if len(parts) > layer_location else 0
        use_more_bits = index < blocks // 8 or index >= 7 * blocks // 8 or (index - blocks // 8) % 3 == 2
        v_proj = "v_proj" in path and "qkv_proj" not in path
        if ((v_proj or "down_proj" in path) and use_more_bits) or "lm_head" in path:
            bits[path] = high_bits
    return bits


def llama(blocks: int, pools: bool, tied: bool = False) -> Program:
    """A llama of so many blocks with the names of its layers, over pools or with past and present."""
    nodes = [Node("mlx.embedding", ("input_ids", "model.embed_tokens"), ("h",))]
    layers, x, inputs, outputs = {"model.embed_tokens": {"kind": "Embedding"}}, "h", [], []

    def linear(source: str, path: str, result: str) -> str:
        layers[path] = {"kind": "Linear", "bias": False}
        nodes.append(Node("mlx.linear", (source, path), (result,)))
        return result

    for i in range(blocks):
        at, past = f"model.layers.{i}", [f"past_key_values.{i}.{part}" for part in ("key", "value")]
        present = [name.replace("past_key_values", "present") for name in past]
        nodes.append(Node("mlx.rms_norm", (x, "norm"), (f"n{i}",)))
        q, k, v = (linear(f"n{i}", f"{at}.self_attn.{p}_proj", f"{p}{i}") for p in "qkv")
        if pools:
            nodes.append(Node("mlx.attention", (q, k, v, *past, "lanes", "seen"), (f"a{i}", *present)))
        else:
            nodes += [
                Node("Concat-4", pair, (to,)) for pair, to in zip(zip(past, (k, v), strict=True), present, strict=True)
            ]
            nodes += [
                Node("MatMul-1", (q, present[0]), (f"s{i}",)), Node("Softmax-13", (f"s{i}",), (f"p{i}",)),
                Node("MatMul-1", (f"p{i}", present[1]), (f"a{i}",)),
            ]  # fmt: skip
        o = linear(f"a{i}", f"{at}.self_attn.o_proj", f"o{i}")
        nodes.append(Node("Add-7", (x, o), (f"y{i}",)))
        nodes.append(Node("mlx.rms_norm", (f"y{i}", "norm"), (f"m{i}",)))
        gate, up = (linear(f"m{i}", f"{at}.mlp.{p}_proj", f"{p}{i}") for p in ("gate", "up"))
        nodes.append(Node("mlx.gate", (gate, up), (f"g{i}",), {"kind": "silu"}))
        down = linear(f"g{i}", f"{at}.mlp.down_proj", f"d{i}")
        nodes.append(Node("Add-7", (f"y{i}", down), (f"x{i}",)))
        x = f"x{i}"
        inputs += past
        outputs += present
    if tied:
        nodes.append(Node("mlx.as_linear", (x, "model.embed_tokens"), ("logits",)))
    else:
        linear(x, "lm_head", "logits")
    values = [tuple(Value(name, "float32", None) for name in names) for names in (inputs, ["logits", *outputs])]
    return Program(*values, nodes, layers=layers)


@pytest.mark.parametrize("recipe", QUANTIZATION_RECIPES)
@pytest.mark.parametrize("pools", [False, True])
def test_the_layers_with_more_bits_are_those_of_mlx_lm(recipe, pools):
    for blocks in (*range(1, 34), 61):
        program = llama(blocks, pools, tied=blocks % 2 == 0)
        bits = recipe_bits(program, Quantization.of(recipe), Path("model.onnx"))
        assert bits == mlx_lm_bits(recipe, list(program.layers), blocks), blocks


def test_opaque_names_change_nothing():
    program = llama(11, pools=True)
    names = {path: f"onnx::MatMul_{700 - i}" for i, path in enumerate(program.layers)}
    opaque = replace(
        program,
        nodes=[replace(n, inputs=tuple(names.get(name, name) for name in n.inputs)) for n in program.nodes],
        layers={names[path]: layer for path, layer in program.layers.items()},
    )
    expected = recipe_bits(program, Quantization.of("mixed_3_6"), Path("model.onnx"))
    bits = recipe_bits(opaque, Quantization.of("mixed_3_6"), Path("model.onnx"))
    assert bits == {names[path]: bits for path, bits in expected.items()}


def test_a_value_that_is_the_sum_of_two_products_has_no_value_projection():
    """As with an adapter beside v_proj, whether the sum is a node or a part of the product."""
    program = llama(11, pools=True)
    node = next(node for node in program.nodes if node.inputs[1:] == ("model.layers.0.self_attn.v_proj",))
    at, x, v = program.nodes.index(node), node.inputs[0], node.outputs[0]
    beside = Node("mlx.linear", (x, "adapter"), ("beside",))
    sums = [
        [replace(node, outputs=("product",)), beside, Node("Add-7", ("product", "beside"), (v,))],
        [beside, replace(node, inputs=(*node.inputs, "beside"))],
    ]
    layers = program.layers | {"adapter": {"kind": "Linear", "bias": False}}
    programs = [program] + [
        replace(program, nodes=[*program.nodes[:at], *nodes, *program.nodes[at + 1 :]], layers=layers) for nodes in sums
    ]
    plain, apart, within = (recipe_bits(one, Quantization.of("mixed_3_6"), Path("model.onnx")) for one in programs)
    assert apart == within
    assert node.inputs[1] in plain
    assert node.inputs[1] not in within


def rewritten_program(name: str) -> Program:
    """The fixture's program over pools with the exporter's layers, none of them merged."""
    graph = read_onnx(FIXTURES / name / "model.onnx")
    graph = name_weights(graph.select_outputs(outputs(value.name for value in graph.outputs)))
    program, _ = apply_rewrites(graph, tuple(rewrite for rewrite in GRAPH_REWRITES if rewrite is not merge_projections))
    return apply_rewrites(program, POOL_REWRITES)[0]


@pytest.mark.parametrize("name", NAMED)
def test_exports_get_the_bits_that_mlx_lm_gives_by_name(name):
    program = rewritten_program(name)
    bits = recipe_bits(program, Quantization.of("mixed_3_6"), FIXTURES / name)
    assert bits == mlx_lm_bits("mixed_3_6", list(program.layers), 2)


@pytest.mark.parametrize(
    ("name", "down"),
    [
        ("gpt2", "mlp.c_proj"),
        ("gpt2_ort", "mlp.c_proj.layer"),
        ("bloom", "dense_4h_to_h"),
        ("opt", "fc2"),
        ("gptj", "fc_out"),
    ],
)
def test_down_projections_under_other_names_are_recognized(name, down):
    """mlx_lm refuses these, whose down projections have other names."""
    program = rewritten_program(name)
    bits = recipe_bits(program, Quantization.of("mixed_3_6"), FIXTURES / name)
    assert [path for path in bits if path.endswith(down)] == [path for path in program.layers if path.endswith(down)][
        1:
    ]


@pytest.mark.parametrize("name", ["Gelu", "FastGelu", "BiasGelu", "QuickGelu"])
def test_activations_of_onnxruntime_are_recognized(name):
    program = llama(9, pools=True)
    fused = [
        replace(node, op=f"com.microsoft.{name}-1", inputs=node.inputs[:1], attrs={}) if node.op == "mlx.gate" else node
        for node in program.nodes
    ]
    bits = recipe_bits(replace(program, nodes=fused), Quantization.of("mixed_3_6"), Path("model.onnx"))
    assert bits == mlx_lm_bits("mixed_3_6", list(program.layers), 9)


def test_a_graph_without_down_projections_is_refused():
    with pytest.raises(ConvertError, match=r"no down projection among 1 layers.*mixed_3_6"):
        recipe_bits(llama(0, pools=True, tied=True), Quantization.of("mixed_3_6"), Path("model.onnx"))


def test_a_converted_folder_has_the_bits_of_the_recipe(tmp_path):
    precision = PrecisionOptions(Quantization.of({"recipe": "mixed_2_6", "group_size": 32}))
    program = load_folder(
        convert(FIXTURES / "llama", "model.onnx", tmp_path / "out", progress=False, precision=precision)
    ).decoder.program
    bits = {path: layer.get("bits") for path, layer in program.layers.items()}
    assert bits["lm_head"] == bits["model.layers.1.self_attn.v_proj"] == 6
    assert bits["model.embed_tokens"] == bits["model.layers.0.self_attn.v_proj"] == 2
    assert program.metadata["quantization"]["name"] == "mixed_2_6"
