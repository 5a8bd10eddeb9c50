"""Conversion of good and of bad sources: files that are no model, graphs that are no decoder, configurations."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES
from conversions import assert_refused, convert_model, folder_contents
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder

IDS = [3, 1, 15, 7]


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "models" / "out"


def write_toy(tmp_path, change, **options) -> Path:
    model = toy.decoder(**options)
    change(model)
    return toy.write(tmp_path / "changed", model)


def test_a_converted_folder_runs_as_its_graph(source, out):
    assert convert_model(source, out) == out
    np.testing.assert_allclose(
        toy.converted_logits(out, IDS), toy.onnxruntime_logits(source / "model.onnx", IDS), atol=1e-4
    )
    assert sorted(folder_contents(out)) == ["README.md", "model.safetensors", "program.json"]
    assert not list(out.parent.glob(".*"))


def test_configuration_files_are_copied_and_files_with_code_are_not(tmp_path, out):
    folder = tmp_path / "repository"
    toy.write(folder / "onnx", toy.decoder())
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    (folder / "onnx" / "generation_config.json").write_text('{"top_k": 4}')
    (folder / "modeling_toy.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"")
    convert(folder, "onnx/model.onnx", out, progress=False)
    assert sorted(folder_contents(out)) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "program.json",
    ]
    assert load_folder(out).generation_config == {"top_k": 4}


def test_the_model_card_says_what_was_proved(source, out):
    convert(source, "model.onnx", out, progress=False, base_model="someone/toy")
    card = (out / "README.md").read_text()
    head = card.split("---")[1]
    assert {"library_name: mlx_transmuter", "pipeline_tag: text-generation", "base_model: someone/toy"} <= set(
        head.split("\n")
    )
    program = load_folder(out).decoder.program
    assert f"tolerance {program.metadata['proof']['limit']:.0e}" in card
    assert f"`{program.metadata['cache_mode']}`" in card
    assert "no tokenizer.json" in card
    at_work = {r["name"].replace("_", " ") for r in program.metadata["rewrites"] if r["held"] or r["declined"]}
    assert set(re.findall(r"the rewrite `([\w ]+)`", card)) == at_work


# Files that are no model.


@pytest.mark.parametrize(
    ("data", "match"),
    [(b"", "without a graph|no ONNX model"), (b"\0" * 1000, "no ONNX model"), (b"hello" * 99, "no ONNX model"), (b"{}", "no ONNX model"),
     (onnx.ModelProto(ir_version=9).SerializeToString(), "without a graph")],
)  # fmt: skip
def test_a_file_that_is_no_model_is_refused(source, out, data, match):
    (source / "model.onnx").write_bytes(data)
    assert assert_refused(source, out, match).where == str(source / "model.onnx")


def test_a_missing_file_is_refused(source, out):
    (source / "model.onnx").unlink()
    assert_refused(source, out, "no such file")
    (source / "model.onnx").mkdir()
    assert_refused(source, out, "no such file")
    (source / "model.onnx").rmdir()
    os.mkfifo(source / "model.onnx")  # opening it would wait for ever
    assert_refused(source, out, "no such file")


@pytest.mark.parametrize("external", [False, True])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, out, external):
    source = toy.write(tmp_path / "source", toy.decoder(), external=external)
    whole = (source / "model.onnx").read_bytes()
    fields = len(onnx.ModelProto(graph=toy.decoder().graph).SerializeToString())
    cuts = {
        *range(0, len(whole), len(whole) // 40),
        *range(len(whole) - 12, len(whole)),
        *range(min(fields, len(whole) - 1), len(whole)),
    }
    for size in sorted(cuts):
        (source / "model.onnx").write_bytes(whole[:size])
        assert_refused(source, out)


def test_external_data_that_is_missing_or_cut_short_is_refused(tmp_path, out):
    source = toy.write(tmp_path / "source", toy.decoder(), external=True)
    data = (source / "model.onnx_data").read_bytes()
    for size in range(0, len(data), len(data) // 10):
        (source / "model.onnx_data").write_bytes(data[:size])
        assert_refused(source, out, "'model.onnx_data'")
    (source / "model.onnx_data").unlink()
    assert_refused(source, out, "no file 'model.onnx_data'")
    (tmp_path / "model.onnx_data").write_bytes(data)
    (source / "model.onnx_data").symlink_to("../model.onnx_data")
    assert_refused(source, out, "a source that you trust")
    (source / "model.onnx_data").unlink()
    (source / "model.onnx_data").write_bytes(data)
    convert_model(source, out)


# Graphs that are no decoder.


def without_logits(model):
    del model.graph.output[0]


def rename(model, old, new):
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        node.output[:] = [new if name == old else name for name in node.output]


def two_like_logits(model):
    rename(model, "logits", "odds")
    model.graph.node.append(helper.make_node("Neg", ["odds"], ["more"]))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["batch", "seq", toy.VOCAB]))


NAMES = [("logits", "odds"), ("past_key_values.0.key", "memory.0.key"), ("present.0.key", "now.0.key")]


@pytest.mark.parametrize("renamed", [NAMES[:1], NAMES[1:2], NAMES[2:], NAMES], ids=str)
def test_inputs_and_outputs_without_telling_names_are_known_by_order_and_shape(tmp_path, out, renamed):
    source = write_toy(tmp_path, lambda model: [rename(model, *names) for names in renamed])
    convert_model(source, out)
    np.testing.assert_allclose(toy.converted_logits(out, IDS), toy.onnxruntime_logits(toy.decoder(), IDS), atol=1e-4)


GENAI = {
    "inputs": {"input_ids": "words", "attention_mask": "real", "past_key_names": "kept"},
    "outputs": {"logits": "odds"},
}


@pytest.mark.parametrize("say", [GENAI, {}, {"inputs": 3}, {"inputs": {"input_ids": "none"}}])
def test_inputs_are_named_as_genai_config_says(tmp_path, out, say):
    def change(model):
        for key, name in (*GENAI["inputs"].items(), *GENAI["outputs"].items()):
            rename(model, key, name)

    source = write_toy(tmp_path, change)
    (source / "genai_config.json").write_text(json.dumps({"model": {"decoder": say}}))
    if say is GENAI:
        convert_model(source, out)
        np.testing.assert_allclose(
            toy.converted_logits(out, IDS), toy.onnxruntime_logits(toy.decoder(), IDS), atol=1e-4
        )
    else:
        assert_refused(source, out, "the inputs words")


DECODERS = {
    "no logits": (without_logits, "the outputs present.0.key"),
    "two outputs like logits": (two_like_logits, "the outputs odds, present.0.key, more"),
    "a present under another name": (lambda m: rename(m, "present.0.key", "present.1.key"), "'past_key_values.0.key'"),
    "no tokens": (lambda m: rename(m, "input_ids", "words"), "the inputs words|input_ids"),
    "an input of a task": (lambda m: m.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3])), "the inputs pixel_values"),
    "heads of no fixed size": (lambda m: setattr(m.graph.input[3].type.tensor_type.shape.dim[1], "dim_param", "heads"), "past_key_values.0.key"),
    "a vocabulary that it does not embed": (lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[2], "dim_value", toy.VOCAB + 1), "logits of 17 tokens, and a table of 16"),
    "a vocabulary that it does not give": (lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[2], "dim_value", toy.VOCAB - 1), r"logits of shape .1, 13, 16."),
}  # fmt: skip


@pytest.mark.parametrize("what", DECODERS)
def test_a_graph_that_is_no_decoder_is_refused(tmp_path, out, what):
    change, match = DECODERS[what]
    error = assert_refused(write_toy(tmp_path, change), out, match)
    assert error.expected
    assert error.do


def test_unsupported_operators_are_refused_in_one_list(tmp_path, out):
    def change(model):
        for i, kind in enumerate(("Frob", "Frob", "Blur")):
            model.graph.node.append(helper.make_node(kind, ["x"], [f"f{i}"], name=f"/{kind}_{i}"))

    assert_refused(write_toy(tmp_path, change), out, r"Blur \(1, such as '/Blur_2'\), Frob \(2, such as '/Frob_0'\)")


def test_a_graph_that_cannot_run_is_refused_by_its_node(tmp_path, out):
    def change(model):
        toy.node(model, "keys").attribute[0].ints[:] = [0, 1, 2, 3]  # keys are not turned, so the product does not fit

    error = assert_refused(write_toy(tmp_path, change), out)
    assert "MatMul" in error.node


def test_a_shape_that_depends_on_tokens_is_refused_by_node_and_value(tmp_path, out):
    def change(model):
        toy.node(model, "rows").input[0] = "first"
        model.graph.node.insert(0, helper.make_node("ReduceMin", ["position_ids"], ["first"], keepdims=0))

    error = assert_refused(write_toy(tmp_path, change), out, "'first'")
    assert "Range" in error.node


def test_logits_that_are_no_numbers_are_refused(tmp_path, out):
    def change(model):
        toy.replace(model, "head.bias", numpy_helper.from_array(np.full(toy.VOCAB, np.nan, np.float32)))

    assert_refused(write_toy(tmp_path, change), out, "0 of them finite")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(source, out):
    tokenizers = pytest.importorskip("tokenizers")
    for size in (toy.VOCAB, toy.VOCAB + 1):
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")
        tokenizers.Tokenizer(words).save(str(source / "tokenizer.json"))
        if size > toy.VOCAB:
            assert_refused(source, out, f"a vocabulary of {toy.VOCAB} tokens and a tokenizer with {size}")
        else:
            shutil.rmtree(convert_model(source, out))


@pytest.mark.parametrize("text", ["[]", "{", "3"])
@pytest.mark.parametrize("name", ["config.json", "genai_config.json", "generation_config.json"])
def test_a_broken_configuration_is_refused_by_name(source, out, name, text):
    """What loading would refuse, the conversion refuses."""
    (source / name).write_text(text)
    assert_refused(source, out, rf"source/{name}: ")


@pytest.mark.parametrize("most", [1, 2, True])
def test_a_configuration_with_fewer_positions_than_the_proof_decodes_is_ignored(source, out, most):
    (source / "config.json").write_text(json.dumps({"n_positions": most}))
    np.testing.assert_allclose(
        toy.converted_logits(convert_model(source, out), IDS),
        toy.onnxruntime_logits(source / "model.onnx", IDS),
        atol=1e-4,
    )
    assert load_folder(out).decoder.program.metadata["trained_length"] is None


@pytest.mark.parametrize(("name", "rows"), [("gpt2", 256), ("opt", 256), ("llama", None)])
def test_tables_end_rows_whatever_the_configuration_says(name, rows, tmp_path):
    """No step may read past a table; a configuration alone says only what the model was trained for."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / name, source)
    config = json.loads((source / "config.json").read_bytes())
    config |= {key: 100_000 for key in ("n_positions", "n_ctx", "max_position_embeddings") if key in config}
    (source / "config.json").write_text(json.dumps(config))
    module = load_folder(convert(source, "model.onnx", tmp_path / "out", progress=False)).decoder
    assert module.program.metadata["trained_length"] == 100_000
    assert (module.position_limit and module.position_limit.tokens) == rows
