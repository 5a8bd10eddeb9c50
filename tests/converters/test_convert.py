"""Conversion: what a bad source, a full disk or Ctrl-C leave behind, and what a wrong module comes to."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import onnx
import pytest
import toy
from conftest import FIXTURES
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters import pipeline, source_graph, staging
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import proof, rewrite_search
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import Program, weights

IDS = [3, 1, 15, 7]


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "models" / "out"


def run(source: Path, out: Path) -> Path:
    return convert(source, "model.onnx", out, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(source: Path, out: Path, match: str = "", error: type[BaseException] = ConvertError):
    """The conversion ends in the error, and everything around the target is as it was."""
    around = out.parent
    before = (out.exists(), contents(around) if around.exists() else {})
    with pytest.raises(error, match=match or None) as found:
        run(source, out)
    assert (out.exists(), contents(around) if around.exists() else {}) == before
    assert not around.exists() or not list(around.glob(".*"))
    return found.value


def changed(tmp_path, change, **options) -> Path:
    model = toy.decoder(**options)
    change(model)
    return toy.write(tmp_path / "changed", model)


def test_a_converted_folder_runs_as_its_graph(source, out):
    assert run(source, out) == out
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(source / "model.onnx", IDS), atol=1e-4)
    assert sorted(contents(out)) == ["README.md", "model.safetensors", "program.json"]
    assert not list(out.parent.glob(".*"))


def test_what_stands_beside_the_graph_goes_along_and_nothing_that_holds_code(tmp_path, out):
    folder = tmp_path / "repository"
    toy.write(folder / "onnx", toy.decoder())
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "generation_config.json").write_text('{"top_k": 3}')
    (folder / "onnx" / "generation_config.json").write_text('{"top_k": 4}')
    (folder / "modeling_toy.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"")
    convert(folder, "onnx/model.onnx", out, progress=False)
    assert sorted(contents(out)) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "program.json",
    ]
    assert load_folder(out).generation_config == {"top_k": 4}


def test_the_card_says_what_was_proved(source, out):
    convert(source, "model.onnx", out, progress=False, base_model="someone/toy")
    card = (out / "README.md").read_text()
    head = card.split("---")[1]
    assert {"library_name: mlx_transmuter", "pipeline_tag: text-generation", "base_model: someone/toy"} <= set(
        head.split("\n")
    )
    program = load_folder(out).decoder.program
    assert f"limit {program.metadata['proof']['limit']:.0e}" in card
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
    assert refused(source, out, match).where == str(source / "model.onnx")


def test_a_missing_file_is_refused(source, out):
    (source / "model.onnx").unlink()
    refused(source, out, "no such file")
    (source / "model.onnx").mkdir()
    refused(source, out, "no such file")
    (source / "model.onnx").rmdir()
    os.mkfifo(source / "model.onnx")  # opening it would wait for ever
    refused(source, out, "no such file")


@pytest.mark.parametrize("external", [False, True])
def test_every_cut_of_a_file_is_refused(tmp_path, out, external):
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
        refused(source, out)


def test_external_data_that_is_missing_or_cut_is_refused(tmp_path, out):
    source = toy.write(tmp_path / "source", toy.decoder(), external=True)
    data = (source / "model.onnx_data").read_bytes()
    for size in range(0, len(data), len(data) // 10):
        (source / "model.onnx_data").write_bytes(data[:size])
        refused(source, out, "'model.onnx_data'")
    (source / "model.onnx_data").unlink()
    refused(source, out, "no file 'model.onnx_data'")
    (tmp_path / "model.onnx_data").write_bytes(data)
    (source / "model.onnx_data").symlink_to("../model.onnx_data")
    refused(source, out, "a source that you trust")
    (source / "model.onnx_data").unlink()
    (source / "model.onnx_data").write_bytes(data)
    run(source, out)


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
def test_names_that_say_nothing_are_told_by_order_and_shape(tmp_path, out, renamed):
    source = changed(tmp_path, lambda model: [rename(model, *names) for names in renamed])
    run(source, out)
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(toy.decoder(), IDS), atol=1e-4)


GENAI = {
    "inputs": {"input_ids": "words", "attention_mask": "real", "past_key_names": "kept"},
    "outputs": {"logits": "odds"},
}


@pytest.mark.parametrize("say", [GENAI, {}, {"inputs": 3}, {"inputs": {"input_ids": "none"}}])
def test_names_of_inputs_are_those_that_genai_config_says(tmp_path, out, say):
    def change(model):
        for key, name in (*GENAI["inputs"].items(), *GENAI["outputs"].items()):
            rename(model, key, name)

    source = changed(tmp_path, change)
    (source / "genai_config.json").write_text(json.dumps({"model": {"decoder": say}}))
    if say is GENAI:
        run(source, out)
        np.testing.assert_allclose(toy.found(out, IDS), toy.expected(toy.decoder(), IDS), atol=1e-4)
    else:
        refused(source, out, "the inputs words")


DECODERS = {
    "no logits": (without_logits, "the outputs present.0.key"),
    "two outputs like logits": (two_like_logits, "the outputs odds, present.0.key, more"),
    "a present under another name": (lambda m: rename(m, "present.0.key", "present.1.key"), "'past_key_values.0.key'"),
    "no tokens": (lambda m: rename(m, "input_ids", "words"), "the inputs words|input_ids"),
    "an input of a task": (lambda m: m.graph.input.append(helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [1, 3])), "the inputs pixel_values"),
    "heads of no fixed size": (lambda m: setattr(m.graph.input[3].type.tensor_type.shape.dim[1], "dim_param", "heads"), "past_key_values.0.key"),
    "a vocabulary that it does not give": (lambda m: setattr(m.graph.output[0].type.tensor_type.shape.dim[2], "dim_value", toy.VOCAB + 1), "logits .16."),
}  # fmt: skip


@pytest.mark.parametrize("what", DECODERS)
def test_a_graph_that_is_no_decoder_is_refused(tmp_path, out, what):
    change, match = DECODERS[what]
    error = refused(changed(tmp_path, change), out, match)
    assert error.expected
    assert error.do


def test_unsupported_operators_are_refused_in_one_list(tmp_path, out):
    def change(model):
        for i, kind in enumerate(("Frob", "Frob", "Blur")):
            model.graph.node.append(helper.make_node(kind, ["x"], [f"f{i}"], name=f"/{kind}_{i}"))

    refused(changed(tmp_path, change), out, r"Blur \(1, such as '/Blur_2'\), Frob \(2, such as '/Frob_0'\)")


def test_a_graph_that_cannot_run_is_refused_by_its_node(tmp_path, out):
    def change(model):
        toy.node(model, "keys").attribute[0].ints[:] = [0, 1, 2, 3]  # keys are not turned, so the product does not fit

    error = refused(changed(tmp_path, change), out)
    assert "MatMul" in error.node


def test_a_shape_that_depends_on_tokens_is_refused_by_node_and_value(tmp_path, out):
    def change(model):
        toy.node(model, "rows").input[0] = "first"
        model.graph.node.insert(0, helper.make_node("ReduceMin", ["position_ids"], ["first"], keepdims=0))

    error = refused(changed(tmp_path, change), out, "'first'")
    assert "Range" in error.node


def test_logits_that_are_no_numbers_are_refused(tmp_path, out):
    def change(model):
        toy.replace(model, "head.bias", numpy_helper.from_array(np.full(toy.VOCAB, np.nan, np.float32)))

    refused(changed(tmp_path, change), out, "0 of them finite")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(source, out):
    tokenizers = pytest.importorskip("tokenizers")
    for size in (toy.VOCAB, toy.VOCAB + 1):
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")
        tokenizers.Tokenizer(words).save(str(source / "tokenizer.json"))
        if size > toy.VOCAB:
            refused(source, out, f"a vocabulary of {toy.VOCAB} tokens and a tokenizer with {size}")
        else:
            shutil.rmtree(run(source, out))


@pytest.mark.parametrize("text", ["[]", "{", "3"])
@pytest.mark.parametrize("name", ["config.json", "genai_config.json", "generation_config.json"])
def test_a_broken_configuration_is_refused_by_name(source, out, name, text):
    """What loading would refuse, the conversion refuses."""
    (source / name).write_text(text)
    refused(source, out, rf"source/{name}: ")


@pytest.mark.parametrize("most", [1, 2, True])
def test_fewer_positions_than_the_proof_decodes_are_not_believed(source, out, most):
    (source / "config.json").write_text(json.dumps({"n_positions": most}))
    np.testing.assert_allclose(toy.found(run(source, out), IDS), toy.expected(source / "model.onnx", IDS), atol=1e-4)
    assert load_folder(out).decoder.program.metadata["max_positions"] is None


# Targets.


def test_a_converted_folder_is_replaced(source, out, tmp_path):
    run(source, out)
    (out / "stale.txt").write_text("of the old conversion")
    other = toy.write(tmp_path / "other", toy.decoder(seed=5))
    run(other, out)
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(other / "model.onnx", IDS), atol=1e-4)
    assert not (out / "stale.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_empty_folder_is_taken(source, out):
    out.mkdir(parents=True)
    run(source, out)
    assert (out / "program.json").is_file()


@pytest.mark.parametrize("relative", [False, True])
def test_the_current_folder_is_refused_before_any_work(source, out, monkeypatch, relative):
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    with pytest.raises(ConvertError, match=r"the current folder.*name one inside it"):
        run(source, Path(".") if relative else out)
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_of_something_else_is_refused(source, out):
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("years of work")
    refused(source, out, "no converted folder")
    (out / "program.json").write_text('{"schedule": []}')  # somebody else's program
    refused(source, out, "no converted folder")
    shutil.rmtree(out)
    out.write_text("a file")
    refused(source, out, "no converted folder")
    out.unlink()
    out.symlink_to("nowhere")
    refused(source, out, "no converted folder")


def test_the_folder_of_the_source_is_never_replaced(source, tmp_path):
    run(source, tmp_path / "old")
    for place in (tmp_path / "old", tmp_path / "old" / "onnx"):
        place.mkdir(exist_ok=True)
        shutil.copy(source / "model.onnx", place)
        before = contents(tmp_path / "old")
        with pytest.raises(ConvertError, match="no converted folder"):
            convert(place, "model.onnx", tmp_path / "old", progress=False)
        assert contents(tmp_path / "old") == before


def test_a_target_that_cannot_be_written_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvertError, match="file"):
        run(source, tmp_path / "file" / "out")

    def denied(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out")

    monkeypatch.setattr(os, "mkdir", denied)
    refused(source, tmp_path / "models" / "out", "Permission denied")


# What ends a conversion in its course.


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*args, **options):
    raise KeyboardInterrupt


def no_memory(*args, **options):
    raise MemoryError("Unable to allocate 9 TiB")


def unwritable(*args, **options):
    raise RuntimeError("[write] Unable to write 300092 bytes to file.")


STAGES = {
    "reading": (source_graph, "read_onnx"),
    "naming": (source_graph, "name_weights"),
    "copying the configuration": (shutil, "copyfile"),
    "rewriting": (rewrite_search, "apply_rewrites"),
    "saving the weights": (mx, "save_safetensors"),
    "loading the weights": (weights, "load"),
    "running the graph": (proof, "reference_logits"),
    "running the module": (proof, "decoder_logits"),
    "saving the program": (Program, "save"),
    "loading all again": (staging, "load_module"),
    "writing the card": (pipeline, "render_model_card"),
    "giving the folder its name": (Path, "rename"),
}
ENDS = {
    "a full disk": (full, ConvertError, "a full disk"),
    "Ctrl-C": (interrupted, KeyboardInterrupt, ""),
    "no memory": (no_memory, ConvertError, "MemoryError: Unable to allocate"),
    "a file that cannot be written": (unwritable, ConvertError, "Unable to write"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ENDS)
def test_what_ends_a_conversion_leaves_all_as_it_was(source, out, tmp_path, monkeypatch, stage, end):
    (source / "config.json").write_text("{}")
    breaks, error, match = ENDS[end]
    if stage == "running the module" and end != "Ctrl-C":
        match = "disagrees with its graph"  # a mode that cannot run is not taken; here none can
    earlier = toy.write(tmp_path / "earlier", toy.decoder(seed=9))
    for before in (lambda: None, lambda: run(earlier, out)):
        before()
        with monkeypatch.context() as patch:
            patch.setattr(*STAGES[stage], breaks)
            refused(source, out, match, error)
    np.testing.assert_allclose(toy.found(out, IDS), toy.expected(earlier / "model.onnx", IDS), atol=1e-4)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_rename_that_fails_halfway_puts_the_old_folder_back(source, out, monkeypatch, fails):
    run(source, out)
    before, calls, real = contents(out), [], Path.rename

    def rename(self, target):
        calls.append(target)
        if len(calls) == fails:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        run(source, out)
    assert contents(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [0, 100, 1000, 2000])
def test_a_disk_that_takes_no_more_bytes(source, out, limit):
    """The system's own limit on the size of a file, which ends a write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    toy.write(source, toy.decoder())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(ConvertError):
            run(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.parent.iterdir())


# The proof itself.


def test_the_error_is_relative_to_the_spread_and_infinite_where_numbers_lack():
    wanted = [[np.array([0.0, 10.0, 5.0])], []]
    assert proof.logit_error([[np.array([0.0, 10.0, 5.5])], []], wanted) == pytest.approx(0.05)
    for one in (np.nan, np.inf, -np.inf):
        assert proof.logit_error([[np.array([0.0, 10.0, one])], []], wanted) == float("inf")
    hidden = [[np.array([0.0, 10.0, -np.inf])], []]
    assert proof.logit_error(hidden, hidden) == 0
    assert proof.logit_error(wanted, hidden) == float("inf")
    with pytest.raises(ValueError):
        proof.logit_error([[], []], wanted)


def test_the_case_has_ragged_rows_a_padding_row_and_steps():
    case = proof.ProofBatch.random(64, [13, 5, 0])
    assert [len(prompt) for prompt in case.prompts] == [13, 5, 0]
    assert {len(following) for following in case.decode_tokens} == {proof.DECODE_STEPS}
    assert all(16 <= token < 64 for row in (*case.prompts, *case.decode_tokens) for token in row)


def test_the_graph_runs_as_onnxruntime_runs_it(source):
    """The logits that a conversion compares with are those of the file."""
    from mlx_transmuter import ops
    from mlx_transmuter.converters.onnx_reader.reader import read_onnx
    from mlx_transmuter.converters.onnx_reader.weight_names import name_weights
    from mlx_transmuter.program.signature import DecoderSignature
    from mlx_transmuter.runtime.module import ProgramModule

    program = name_weights(read_onnx(source / "model.onnx"))
    module = ProgramModule(program, {name: ops.to_device(tensor.read()) for name, tensor in program.tensors.items()})
    case = proof.ProofBatch([IDS, []], [[2, 9], [4, 4]])
    found, nothing = proof.reference_logits(module, DecoderSignature.from_program(program), case)
    assert nothing == []
    for i, logits in enumerate(found):
        np.testing.assert_allclose(logits, toy.expected(source / "model.onnx", [*IDS, 2, 9][: len(IDS) + i]), atol=1e-4)


@pytest.mark.parametrize(("name", "rows"), [("gpt2", 256), ("opt", 256), ("llama", 256)])
def test_no_more_positions_than_the_position_table_has_rows(name, rows, tmp_path):
    """A configuration that promises more must not make a step read past the table; without a table it is believed."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / name, source)
    config = json.loads((source / "config.json").read_bytes())
    config |= {key: 4096 for key in ("n_positions", "n_ctx", "max_position_embeddings") if key in config}
    (source / "config.json").write_text(json.dumps(config))
    folder = convert(source, "model.onnx", tmp_path / "out", progress=False)
    assert load_folder(folder).decoder.program.metadata["max_positions"] == (4096 if name == "llama" else rows)
