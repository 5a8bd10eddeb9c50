"""Files of a model that are not its decoder, and pointers of Git LFS: each is refused by what it is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import toy
from onnx import TensorProto, helper, numpy_helper

from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program import ProgramError
from mlx_transmuter.tokenizer import Tokenizer, TokenizerError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
IDS = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "seq"])
MASK = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "seq"])
PIXELS = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", "patches", 8])


def one_node_model(kind: str, inputs: list[onnx.ValueInfoProto], output: str) -> onnx.ModelProto:
    """Returns a model of one node whose output has three axes, as logits have."""
    table = numpy_helper.from_array(np.ones((64, 8), np.float32), "table")
    operands = ["table", "input_ids"] if kind == "Gather" else [inputs[0].name]
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", "seq", 8])
    graph = helper.make_graph([helper.make_node(kind, operands, [output])], "part", inputs, [result], [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


PARTS = {
    "embed_tokens.onnx": (one_node_model("Gather", [IDS], "inputs_embeds"), "the embeddings of tokens"),
    "encoder_model.onnx": (one_node_model("Gather", [IDS, MASK], "last_hidden_state"), "an encoder"),
    "vision_encoder.onnx": (one_node_model("Identity", [PIXELS], "image_features"), "an encoder of images"),
}


def refuse(folder, file: str) -> ConvertError:
    with pytest.raises(ConvertError) as error:
        convert(folder, file, folder.parent / "out", progress=False)
    return error.value


@pytest.mark.parametrize("file", PARTS)
@pytest.mark.parametrize("decoder", ["decoder_model_merged.onnx", None])
def test_a_part_beside_the_decoder_is_named_and_so_is_the_decoder(tmp_path, file, decoder):
    model, kind = PARTS[file]
    folder = toy.write(tmp_path / "source", model, file)
    if decoder:
        toy.write(folder, toy.decoder(), decoder)
    error = refuse(folder, file)
    assert kind in error.found
    for value in (*model.graph.input, *model.graph.output):
        assert value.name in error.found
    assert error.do == (f"convert {decoder}" if decoder else "choose the decoder among the model's files")


@pytest.mark.parametrize("encoder", ["encoder_model.onnx", None])
def test_a_decoder_that_reads_an_encoders_states_is_refused_with_the_encoders_file(tmp_path, encoder):
    model = toy.decoder()
    states = [("encoder_hidden_states", ["batch", "length", 8]), ("encoder_attention_mask", ["batch", "length"])]
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in states)
    folder = toy.write(tmp_path / "source", model, "decoder_model_merged.onnx")
    if encoder:
        toy.write(folder, PARTS[encoder][0], encoder)
    error = refuse(folder, "decoder_model_merged.onnx")
    assert "an encoder's states (encoder_hidden_states, encoder_attention_mask)" in error.found
    assert ("encoder_model.onnx" in error.found) == bool(encoder)
    assert "encoder-decoders are not supported yet" in error.do


@pytest.mark.parametrize("embeddings", ["embed_tokens.onnx", None])
def test_a_decoder_of_embeddings_is_refused_with_the_file_that_makes_them(tmp_path, embeddings):
    model = toy.decoder()
    model.graph.node.remove(toy.node(model, "embedded"))
    for node in model.graph.node:
        node.input[:] = ["inputs_embeds" if name == "embedded" else name for name in node.input]
    model.graph.input[0].CopyFrom(
        helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "seq", toy.DIM])
    )
    folder = toy.write(tmp_path / "source", model, "decoder_model_merged.onnx")
    if embeddings:
        toy.write(folder, PARTS[embeddings][0], embeddings)
    error = refuse(folder, "decoder_model_merged.onnx")
    assert "a decoder that takes embeddings (inputs_embeds)" in error.found
    assert ("embed_tokens.onnx" in error.found) == bool(embeddings)
    assert "merged" not in error.do


@pytest.mark.parametrize("outputs", [0, 1])
def test_an_empty_list_of_names_is_said_in_words(tmp_path, outputs):
    model = toy.decoder()
    del model.graph.output[outputs:]
    error = refuse(toy.write(tmp_path / "source", model), "model.onnx")
    assert "no outputs" in error.found
    assert not error.found.endswith(" ")


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx_data", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_refused_by_its_name(tmp_path, name):
    folder = toy.write(tmp_path / "source", toy.decoder(), external=True)
    (folder / name).write_bytes(POINTER)
    error = refuse(folder, "model.onnx")
    assert error.where == str(folder / name)
    assert error.found == "a Git LFS pointer"
    assert "git lfs pull" in error.do


@pytest.mark.parametrize("name", ["model.safetensors", "program.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_in_a_converted_folder_is_refused_by_its_name(tmp_path, name):
    folder = convert(toy.write(tmp_path / "source", toy.decoder()), "model.onnx", tmp_path / "out", progress=False)
    (folder / name).write_bytes(POINTER)
    with pytest.raises((ProgramError, TokenizerError), match=r"a Git LFS pointer.*git lfs pull"):
        load_folder(folder)
    if name == "tokenizer.json":
        with pytest.raises(TokenizerError, match=r"a Git LFS pointer.*git lfs pull"):
            Tokenizer.from_folder(folder)
