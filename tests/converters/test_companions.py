"""Companions of a source: regular files inside its folder, of the size of their kind; one rule, whoever converts."""

import os

import pytest
import toy
from conversions import folder_contents

from mlx_transmuter import limited_files
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.folder_format import COMPANION_FILES, FolderError
from mlx_transmuter.limited_files import read_json_object
from mlx_transmuter.tokenizer import Tokenizer, TokenizerError

TEMPLATE = "additional_chat_templates/x.jinja"


@pytest.fixture
def source(tmp_path):
    source = toy.write(tmp_path / "source", toy.decoder())
    (source / "onnx").mkdir()
    (source / "model.onnx").rename(source / "onnx" / "model.onnx")
    (source / "additional_chat_templates").mkdir()
    return source


def assert_refused(source, tmp_path, match, name=""):
    with pytest.raises(ConvertError, match=match) as error:
        convert(source, "onnx/model.onnx", tmp_path / "out", progress=False)
    assert name in error.value.where
    assert ".partial" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [*sorted(COMPANION_FILES), TEMPLATE, "onnx/config.json"])
def test_a_link_out_of_the_source_is_refused(source, tmp_path, name):
    (tmp_path / "secret").write_text("{}")
    (source / name).symlink_to(tmp_path / "secret")
    assert_refused(source, tmp_path, "a file inside its folder", name)


def test_a_link_inside_the_source_and_those_of_a_snapshot_are_followed(source, tmp_path):
    (source / "settings").write_text('{"model_type": "toy"}')
    (source / "onnx" / "config.json").symlink_to(source / "settings")
    snapshot = tmp_path / "models--x" / "snapshots" / "c"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    (snapshot / "onnx" / "config.json").unlink()
    (snapshot / "onnx" / "config.json").symlink_to("../settings")
    (tmp_path / "models--x" / "blobs").mkdir()
    (snapshot / "onnx" / "model.onnx").rename(tmp_path / "models--x" / "blobs" / "0")
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/0")
    convert(snapshot, "onnx/model.onnx", tmp_path / "out", progress=False)
    assert folder_contents(tmp_path / "out")["config.json"] == b'{"model_type": "toy"}'


def test_the_graph_itself_is_no_link_out_of_the_source(source, tmp_path):
    (source / "onnx" / "model.onnx").rename(tmp_path / "model.onnx")
    (source / "onnx" / "model.onnx").symlink_to(tmp_path / "model.onnx")
    assert_refused(source, tmp_path, "a file inside its folder", "model.onnx")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", TEMPLATE])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
def test_what_is_no_regular_file_is_refused_and_not_read(source, tmp_path, name, kind):
    if kind == "pipe":
        os.mkfifo(source / name)
    elif kind == "folder":
        (source / name).mkdir()
    else:
        (source / name).symlink_to("nothing")
    assert_refused(source, tmp_path, r"expected a file\.", name)


@pytest.mark.parametrize(
    ("name", "limit"), [("config.json", "JSON"), (TEMPLATE, "TEMPLATE"), ("vocab.txt", "TOKENIZER")]
)
def test_a_companion_too_large_for_its_kind_is_refused(source, tmp_path, name, limit):
    size = getattr(limited_files, f"MAX_{limit}_BYTES")
    with open(source / name, "wb") as file:
        file.truncate(size + 1)  # a hole, which takes no room
    assert_refused(source, tmp_path, f"{size + 1:,} bytes; expected at most {size:,}", name)


def test_a_broken_tokenizer_is_named_where_the_user_has_it(source, tmp_path):
    (source / "tokenizer.json").write_text("no JSON")
    with pytest.raises(TransmuterError) as error:
        convert(source, "onnx/model.onnx", tmp_path / "out", progress=False)
    assert error.value.where == str(source / "tokenizer.json")


@pytest.mark.parametrize("error", [FolderError, TokenizerError])
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"])
def test_json_that_is_no_object_is_the_error_of_whoever_reads_it(tmp_path, error, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(error, match="download the file again") as raised:
        read_json_object(tmp_path / "config.json", error)
    assert raised.value.where == str(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_tokenizer_reads_no_pipe(tmp_path, name):
    if name != "tokenizer.json":
        (tmp_path / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(TokenizerError):
        Tokenizer.from_folder(tmp_path)
