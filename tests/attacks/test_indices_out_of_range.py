"""Files and converted folders whose indices leave the arrays that they index: an error of ours, or an answer that nothing
but the file decides.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import onnx
import pytest
from conftest import FIXTURES
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.model import load_folder
from mlx_transmuter.runtime.decoder import Decoder
from mlx_transmuter.runtime.errors import DecoderError

VOCAB, DIM = 64, 8


def table(rows: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, DIM)).astype(np.float32)


def head() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(DIM, VOCAB)).astype(np.float32)


def save_decoder(folder: Path, nodes: list[onnx.NodeProto], **constants: np.ndarray) -> Path:
    """Writes a decoder without a cache: logits = (what the nodes make of input_ids, "embedded") times the head."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["embedded", "head"], ["logits"])],
        "decoder",
        [value("input_ids", TensorProto.INT64, ["batch", "seq"])],
        [value("logits", TensorProto.FLOAT, ["batch", "seq", VOCAB])],
        [numpy_helper.from_array(array, name) for name, array in {**constants, "head": head()}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    folder.mkdir()
    onnx.save(model, str(folder / "model.onnx"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder


def shifted_gather(folder: Path, offset: int, rows: int = VOCAB) -> Path:
    nodes = [
        helper.make_node("Add", ["input_ids", "offset"], ["ids"]),
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
    ]
    return save_decoder(folder, nodes, table=table(rows), offset=np.array(offset, np.int64))


def fill_free_memory(value: float) -> None:
    """Leaves arrays of that value where MLX takes the next memory from."""
    arrays = [mx.full((size,), value) for size in (16, 64, 256, 512, 1024, 4096, 65536) for _ in range(8)]
    mx.eval(arrays)


def logits_of(folder: Path, prompt: list[int], steps: int = 1) -> np.ndarray:
    """The logits [rows, vocab] after a prompt and `steps` more tokens, of two rows."""
    session = Decoder(load_folder(folder).decoder, 2).begin_session([len(prompt) + steps] * 2)
    for tokens in (prompt, *[[3]] * steps):
        logits = session.step(np.array([tokens] * 2, np.int32), [len(tokens)] * 2)
        session.evaluate(logits)
    return np.array(logits.astype(mx.float32))


def assert_bounded(folder: Path, prompt: list[int], steps: int = 1) -> None:
    """Asserts that a folder's decoder ends in an error of ours, or gives the same whatever else the memory holds."""
    outcomes = []
    for value in (float("nan"), 7e3):
        fill_free_memory(value)
        try:
            outcomes.append(logits_of(folder, prompt, steps).tolist())
        except TransmuterError as error:
            outcomes.append(str(error))
    np.testing.assert_equal(outcomes[0], outcomes[1])
    assert isinstance(outcomes[0], str) or np.isfinite(outcomes[0]).all()


def assert_converts_bounded(source: Path, out: Path, prompt: list[int]) -> None:
    try:
        convert(source, "model.onnx", out, progress=False)
    except ConvertError:
        return
    assert_bounded(out, prompt)


# Files.


def test_the_decoder_that_is_changed_here_converts(tmp_path):
    out = convert(shifted_gather(tmp_path / "source", 0), "model.onnx", tmp_path / "out", progress=False)
    np.testing.assert_allclose(logits_of(out, [5, 9])[0], table()[3] @ head(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [64, -(2 * VOCAB), 10**7, -(10**7)])
def test_a_table_that_no_token_is_in_is_an_error(tmp_path, offset):
    source = shifted_gather(tmp_path / "source", offset)
    with pytest.raises(ConvertError, match="Gather"):
        convert(source, "model.onnx", tmp_path / "out", progress=False)


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31 - VOCAB, 2**40, -(2**31), -(2**62)])
def test_ids_that_pass_the_integers_of_a_device_are_bounded(tmp_path, offset):
    assert_converts_bounded(shifted_gather(tmp_path / "source", offset), tmp_path / "out", [1, 2])


def test_a_token_past_a_table_reads_its_last_row(tmp_path):
    out = convert(shifted_gather(tmp_path / "source", 62), "model.onnx", tmp_path / "out", progress=False)
    assert_bounded(out, [1, 2])
    np.testing.assert_allclose(logits_of(out, [1, 0], 0)[0], table()[62] @ head(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits_of(out, [1, 0], 1)[0], table()[63] @ head(), rtol=1e-4, atol=1e-5)


def test_fewer_embeddings_than_logits_are_an_error_that_names_both(tmp_path):
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["embedded"])]
    with pytest.raises(ConvertError, match=r"64 tokens.* 8 tokens"):
        convert(save_decoder(tmp_path / "a", nodes, table=table(8)), "model.onnx", tmp_path / "out", progress=False)


def test_a_scatter_past_an_array_is_bounded(tmp_path):
    nodes = [
        helper.make_node("Add", ["input_ids", "offset"], ["ids"]),
        helper.make_node("Cast", ["input_ids"], ["updates"], to=TensorProto.FLOAT),
        helper.make_node("ScatterElements", ["marks", "ids", "updates"], ["scattered"], axis=1),
        helper.make_node("ReduceSum", ["scattered"], ["sum"]),
        helper.make_node("Gather", ["table", "input_ids"], ["plain"]),
        helper.make_node("Add", ["plain", "sum"], ["embedded"]),
    ]
    arrays = {"marks": np.zeros((1, VOCAB), np.float32), "offset": np.array(4096, np.int64), "table": table()}
    assert_converts_bounded(save_decoder(tmp_path / "source", nodes, **arrays), tmp_path / "out", [1, 2])


def test_logits_declared_wider_than_they_are_name_both_sizes(tmp_path):
    shutil.copytree(FIXTURES / "llama", tmp_path / "llama")
    model = onnx.load(str(tmp_path / "llama" / "model.onnx"))
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 2000
    onnx.save(model, str(tmp_path / "llama" / "model.onnx"))
    with pytest.raises(ConvertError, match=r"2000 tokens.* 384 tokens"):
        convert(tmp_path / "llama", "model.onnx", tmp_path / "out", progress=False)


LENGTHS = "/model/attn_mask_reformat/attn_mask_subgraph/Sub"


def shift_lengths(graph: onnx.GraphProto, by: int) -> None:
    """Adds a number to the seqlens_k of every GroupQueryAttention."""
    cast = next(node for node in graph.node if node.name == f"{LENGTHS}/Cast")
    graph.initializer.append(numpy_helper.from_array(np.array(by, np.int32), "shift"))
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == cast.output[0]:
                node.input[i] = "shifted"
    graph.node.insert(list(graph.node).index(cast) + 1, helper.make_node("Add", [cast.output[0], "shift"], ["shifted"]))


def remove_sub_of_one(graph: onnx.GraphProto) -> None:
    """Makes seqlens_k the tokens that a row holds, not those less 1."""
    sub = next(node for node in graph.node if node.name == LENGTHS)
    cast = next(node for node in graph.node if node.name == f"{LENGTHS}/Cast")
    cast.input[0] = sub.input[0]
    graph.node.remove(sub)


@pytest.mark.parametrize(
    ("fixture", "change"),
    [
        pytest.param("llama_genai", lambda graph: shift_lengths(graph, 3), id="3 more"),
        pytest.param("llama_genai", lambda graph: shift_lengths(graph, 10**6), id="a million more"),
        pytest.param("llama_genai", lambda graph: shift_lengths(graph, -(10**6)), id="a million fewer"),
        pytest.param("qwen3_genai_qdq", remove_sub_of_one, id="one more"),
    ],
)
def test_lengths_past_the_buffers_of_attention_are_bounded(tmp_path, fixture, change):
    shutil.copytree(FIXTURES / fixture, tmp_path / "source")
    model = onnx.load(str(tmp_path / "source" / "model.onnx"), load_external_data=False)
    change(model.graph)
    (tmp_path / "source" / "model.onnx").write_bytes(model.SerializeToString())
    assert_converts_bounded(tmp_path / "source", tmp_path / "out", [5, 6, 7])


# Converted folders.


@pytest.fixture
def folder_of(converted, tmp_path):
    """A function of a fixture's name that gives its converted folder, to change."""

    def copy(name: str) -> Path:
        shutil.copytree(converted(name), tmp_path / name)
        return tmp_path / name

    return copy


def edit_program(folder: Path, change) -> None:
    program = json.loads((folder / "program.json").read_text())
    change(program)
    (folder / "program.json").write_text(json.dumps(program))


def cut_rows(folder: Path, count: int, *names: str) -> None:
    """Leaves the first `count` rows of arrays, in the file and in the program."""
    arrays: dict[str, Any] = dict(mx.load(str(folder / "model.safetensors")))  # type: ignore[arg-type]
    mx.eval(arrays)
    cut = {name: mx.contiguous(arrays[name][:count]) for name in names}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays | cut)

    def change(program: dict) -> None:
        for name, array in cut.items():
            program["weights"][name]["shape"] = list(array.shape)

    edit_program(folder, change)


def weights_of(folder: Path, end: str) -> list[str]:
    return [name for name in json.loads((folder / "program.json").read_text())["weights"] if name.endswith(end)]


def test_a_folder_with_fewer_embeddings_than_logits_does_not_load(folder_of):
    folder = folder_of("qwen3_moe")
    cut_rows(folder, 100, *weights_of(folder, "embed_tokens.weight"))
    with pytest.raises(TransmuterError, match=r"\d+ tokens.* 100 tokens"):
        load_folder(folder)


def test_a_folder_whose_positions_leave_their_table_is_bounded(folder_of):
    folder = folder_of("gpt2")
    cut_rows(folder, 4, *weights_of(folder, "wpe.weight"))
    assert_bounded(folder, [5, 6, 7, 8, 9, 10], 3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_genai", "opt"])
def test_positions_raised_past_every_table_are_bounded(folder_of, name):
    folder = folder_of(name)
    edit_program(folder, lambda program: program["meta"].update(max_positions=100_000))
    prompt = np.random.default_rng(0).integers(3, 300, 299).tolist()
    assert_bounded(folder, prompt, 2)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_a_folder_with_fewer_experts_than_its_router_chooses_among_does_not_load(folder_of, name):
    folder = folder_of(name)
    stacks = [weight for weight in weights_of(folder, ".weight") if ".experts." in weight]
    assert stacks
    cut_rows(folder, 2, *stacks)
    with pytest.raises(TransmuterError, match=r"weights of 2 experts, and a router of [48]"):
        load_folder(folder)


def test_experts_that_the_stacks_lack_are_bounded(folder_of):
    """Where the router is none that the load finds."""
    folder = folder_of("qwen3_moe")

    def add_nothing(program: dict) -> None:
        program["constants"]["nothing"] = {"dtype": "int64", "shape": [1], "data": [0]}
        for node in [node for node in program["nodes"] if node["op"] == "mlx.dispatch"]:
            added = {"op": "Add-7", "inputs": [node["inputs"][1], "nothing"], "outputs": [f"{node['inputs'][1]}.same"]}
            program["nodes"].insert(program["nodes"].index(node), added)
            node["inputs"][1] = added["outputs"][0]

    edit_program(folder, add_nothing)
    cut_rows(folder, 2, *[name for name in weights_of(folder, ".weight") if ".experts." in name])
    assert_bounded(folder, [5, 6, 7])


@pytest.mark.parametrize("array", ["scales", "biases"])
@pytest.mark.parametrize("layer", ["q_proj", "lm_head", "qkv_proj", "o_proj"])
def test_quantized_arrays_of_fewer_rows_than_their_weight_do_not_load(folder_of, layer, array):
    folder = folder_of("llama_q4")
    names = weights_of(folder, f"{layer}.{array}")
    if not names:
        pytest.skip(f"this conversion has no {layer}")
    cut_rows(folder, 8, names[0])
    with pytest.raises(TransmuterError, match=f"{array}.*the weight"):
        load_folder(folder)


# Tokens and rows that a caller gives.


@pytest.mark.parametrize("tokens", [[5, -1], [5, 384], [10**6, 1], [2**31 - 1, 2]])
@pytest.mark.parametrize("as_array", [np.array, mx.array], ids=["host", "device"])
def test_token_ids_outside_the_vocabulary_are_an_error(loaded, tokens, as_array):
    session = Decoder(loaded("llama").decoder, 1).begin_session([4])
    with pytest.raises(DecoderError, match=r"token ids .* 0 to 383"):
        session.step(as_array([tokens]), [2])


@pytest.mark.parametrize("parents", [[0, 2], [-1, 0], [0], [0, 1, 1]])
def test_rows_that_are_not_there_are_no_parents(loaded, parents):
    session = Decoder(loaded("llama").decoder, 2).begin_session([4, 4], paged=True)
    session.evaluate(session.step(np.array([[5, 6], [7, 8]]), [2, 2]))
    with pytest.raises(DecoderError, match="the parents"):
        session.fork(parents)


def test_the_module_itself_clips_what_nothing_bounds(loaded):
    """A caller of the module says nothing of its inputs."""
    module = loaded("gpt2").decoder
    inputs = Decoder(module, 1).graph.step_inputs
    past = inputs.uncached_pools(1, 2) if inputs.signature.uses_pools else inputs.empty_past(1)

    def logits(tokens: list[int]) -> np.ndarray:
        feed = inputs.uniform(tokens=mx.array([tokens]), past_length=0, past=past, logit_indices=mx.array([[0, 1]]))
        return np.array(module(**feed)[inputs.signature.logits_output])

    last = inputs.signature.vocab_size - 1
    np.testing.assert_array_equal(logits([5, 10**8]), logits([5, last]))
