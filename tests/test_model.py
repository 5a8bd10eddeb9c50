"""Model: what a converted folder says, and folders that are not whole."""

from __future__ import annotations

import json
import shutil

import pytest
from mlx.utils import tree_flatten

from mlx_transmuter.folder_format import FolderError
from mlx_transmuter.generation import GenerationError
from mlx_transmuter.limited_files import read_json_object
from mlx_transmuter.model import load_folder, read_generation_config
from mlx_transmuter.program import ProgramError
from mlx_transmuter.tasks import text


def test_a_converted_folder_is_a_model(converted):
    folder = converted("llama")
    model = load_folder(folder)
    assert (model.cache_mode, model.folder) == ("append", folder)
    assert model.config == json.loads((folder / "config.json").read_text())
    assert model.generation_config == json.loads((folder / "generation_config.json").read_text())
    assert model.tokenizer is not None
    assert (model.encoder, model.embed, model.vision) == (None, None, None)
    names = {name for name, _ in tree_flatten(model.decoder.parameters())}
    assert {f"model.layers.1.self_attn.{name}_proj.weight" for name in ("qkv", "o")} <= names
    assert names == set(model.decoder.program.weights)


def test_a_model_without_tokenizer_has_none(converted):
    assert load_folder(converted("gpt2")).tokenizer is None


@pytest.mark.parametrize("meta", [{}, {"cache_mode": "sideways"}, {"cache_mode": ["append"]}, {"cache_mode": None}])
def test_a_folder_that_does_not_say_its_mode_has_the_declared_one(converted, tmp_path, meta):
    shutil.copytree(converted("llama"), tmp_path / "m")
    data = json.loads((tmp_path / "m" / "program.json").read_text())
    del data["meta"]["cache_mode"]
    data["meta"] |= meta
    (tmp_path / "m" / "program.json").write_text(json.dumps(data))
    assert load_folder(tmp_path / "m").cache_mode == "append"


def test_a_folder_that_is_not_whole_is_refused(converted, tmp_path):
    with pytest.raises(ProgramError, match=r"no program\.json"):
        load_folder(tmp_path)
    for victim, match in [("program.json", "no program"), ("model.safetensors", "no file")]:
        folder = tmp_path / victim
        shutil.copytree(converted("gpt2"), folder)
        (folder / victim).unlink()
        with pytest.raises(ProgramError, match=match):
            load_folder(folder)


def test_every_cut_of_the_weights_is_refused(converted, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(converted("gpt2"), folder)
    whole = (folder / "model.safetensors").read_bytes()
    for size in range(0, len(whole), len(whole) // 20):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ProgramError):
            load_folder(folder)


def test_weights_of_another_model_are_refused(converted, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(converted("gpt2"), folder)
    shutil.copy(converted("llama") / "model.safetensors", folder)
    with pytest.raises(ProgramError, match="missing"):
        load_folder(folder)


@pytest.mark.parametrize("text", [b"[]", b"3", b"null", b"{", b"", b"\xff\xfe", b"[" * 10**5])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_object_is_refused_by_name(converted, tmp_path, name, text):
    folder = tmp_path / "m"
    shutil.copytree(converted("gpt2"), folder)
    (folder / name).write_bytes(text)
    with pytest.raises(FolderError) as error:
        load_folder(folder)
    assert error.value.where == str(folder / name)


def test_settings_are_those_of_the_first_file_that_has_them(tmp_path):
    def write(name, value):
        (tmp_path / name).write_text(json.dumps(value))

    assert read_generation_config(tmp_path) == {}
    # Old configurations held some settings; of these from_model_config takes ids and lengths, and nothing of the
    # model's own.
    write("config.json", {"eos_token_id": 2, "pad_token_id": None, "max_length": 30, "vocab_size": 9, "hidden_size": 4})
    assert read_generation_config(tmp_path) == {"eos_token_id": 2, "max_length": 30}
    search = {"top_k": 50, "do_sample": True, "max_length": 4096, "past_present_share_buffer": True}
    write("genai_config.json", {"model": {"eos_token_id": [3, 4], "vocab_size": 9}, "search": search})
    assert read_generation_config(tmp_path) == {
        "eos_token_id": [3, 4],
        "max_length": 30,
        "top_k": 50,
        "do_sample": True,
    }
    write("genai_config.json", {"model": [], "search": None})
    assert read_generation_config(tmp_path) == {"eos_token_id": 2, "max_length": 30}
    write("generation_config.json", {"temperature": 0.5})
    assert read_generation_config(tmp_path) == {"temperature": 0.5}


def test_an_eos_token_that_is_no_id_is_refused(folder, tmp_path):
    place = shutil.copytree(folder, tmp_path / "model")
    (place / "tokenizer.json").unlink()  # its tokenizer would refuse them first
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [[3], {}, 3]}))
    with pytest.raises(GenerationError, match="eos_token_id"):
        text.generation(load_folder(place))


def test_a_missing_file_is_an_empty_object(tmp_path):
    assert read_json_object(tmp_path / "nothing.json", FolderError) == {}
