"""Sources: what is found, chosen, downloaded, converted once and kept; against a stand-in hub on the loopback."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from standin_hub import broken_hub, standin_hub

from mlx_transmuter import api, hub
from mlx_transmuter.folder_format import FolderError, leaves_folder
from mlx_transmuter.hub import SourceError
from mlx_transmuter.sources import Source, choose_decoder_file, fetch_model_files


def external(path: str) -> bytes:
    """TensorProto.external_data with one location, as protobuf writes it."""
    entry = b"\x0a\x08location\x12" + bytes([len(path)]) + path.encode()
    return b"\x6a" + bytes([len(entry)]) + entry


# Contents differ: what has the same content is downloaded once.
CONFIG = {
    name: name.encode() for name in ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_TRANSMUTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch):
    """A converter that writes what it was given: (the files of the folder, the file)."""
    seen = []

    def convert(
        folder, file, out, *, progress=True, base_model=None, precision=None, replace_converted=True, **options
    ):
        seen.append((folder, file))
        out.mkdir(parents=True)
        data = [file, (folder / file).read_bytes().decode("latin-1"), precision and precision.dtype]
        (out / "program.json").write_text(json.dumps(data))
        return out

    monkeypatch.setattr(api, "_import_converter", lambda: convert)
    monkeypatch.setattr("mlx_transmuter.api.load_folder", lambda folder: Path(folder))
    return seen


@pytest.fixture
def remote(tmp_path, monkeypatch, cache):
    """A stand-in hub, asked by a huggingface_hub with an empty cache."""
    from huggingface_hub import constants, file_download

    with standin_hub() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def folder(path: Path, files) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def choose(names, file=None, dtype=None):
    return choose_decoder_file(Source("it", tuple(names), None), file, dtype)


VARIANTS = [
    "model",
    "model_fp16",
    "model_q4",
    "model_q4f16",
    "model_quantized",
    "model_int8",
    "model_uint8",
    "model_bnb4",
]


@pytest.mark.parametrize(
    ("dtype", "stem"),
    list(zip(["fp32", "fp16", "q4", "q4f16", "q8", "int8", "uint8", "bnb4"], VARIANTS, strict=True)),
)
def test_dtypes_are_the_suffixes_of_transformers_js(dtype, stem):
    assert choose([f"onnx/{stem}.onnx" for stem in VARIANTS], dtype=dtype) == f"onnx/{stem}.onnx"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["onnx/model_q4.onnx", "onnx/model_fp16.onnx", "onnx/model.onnx"], "onnx/model.onnx"),
        (["onnx/model_q4f16.onnx", "onnx/model_fp16.onnx", "onnx/model_quantized.onnx"], "onnx/model_fp16.onnx"),
        (["onnx/model_q4f16.onnx", "onnx/model_bnb4.onnx", "onnx/model_int8.onnx"], "onnx/model_int8.onnx"),
        (["decoder_model.onnx", "model.onnx", "decoder_model_merged.onnx"], "decoder_model_merged.onnx"),
        (["decoder_model.onnx", "decoder_with_past_model.onnx", "encoder_model.onnx"], "decoder_with_past_model.onnx"),
        (["onnx/vision_encoder.onnx", "onnx/embed_tokens.onnx", "onnx/model_merged.onnx"], "onnx/model_merged.onnx"),
        (["phi3-mini-4k.onnx", "phi3-mini-4k.onnx.data"], "phi3-mini-4k.onnx"),
        (["gpt_q4.onnx", "gpt_fp16.onnx"], "gpt_fp16.onnx"),
        (["cpu/int4/model.onnx"], "cpu/int4/model.onnx"),
        (["model.onnx", "onnx/model.onnx"], "model.onnx"),
    ],
)  # fmt: skip
def test_without_a_wish_the_most_precise_decoder_is_taken(names, chosen):
    assert choose(names) == chosen
    assert choose(reversed(names)) == chosen


def test_the_choice_is_said_in_one_line(capsys):
    choose(["onnx/model_q4.onnx", "onnx/model_fp16.onnx"])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "onnx/model_fp16.onnx" in error
    assert "q4" in error
    choose(["model.onnx"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("names", "wish", "message"),
    [
        ([], {}, "no ONNX file among nothing"),
        (["a.py", "b.bin"], {}, "no ONNX file among a.py, b.bin"),
        (
            ["cpu/model.onnx", "cuda/model.onnx"],
            {},
            "several files that may be the decoder: cpu/model.onnx, cuda/model.onnx",
        ),
        (["one.onnx", "two.onnx"], {}, "one.onnx, two.onnx.*--file"),
        (["encoder_model.onnx"], {}, "no file that may be the decoder among encoder_model.onnx"),
        (["onnx/model.onnx"], {"file": "model.onnx"}, "no file 'model.onnx'; expected one of onnx/model.onnx"),
        (["model.onnx"], {"file": "../model.onnx"}, "no file '../model.onnx'"),
        (["model.onnx"], {"dtype": "fp61"}, "dtype 'fp61'.*use \"fp16\""),
        (["model.onnx", "model_q4.onnx"], {"dtype": "q8"}, "no q8 file among .*; expected dtype fp32 or q4"),
        (["model.onnx"], {"file": "model.onnx", "dtype": "q4"}, "file 'model.onnx' with dtype q4"),
    ],
)
def test_a_choice_that_cannot_be_made_is_one_clear_line(names, wish, message):
    with pytest.raises(SourceError, match=message) as error:
        choose(names, **wish)
    assert "\n" not in str(error.value)


def test_genai_config_names_the_decoder(tmp_path, cache, conversions):
    config = {"model": {"decoder": {"filename": "text.onnx"}}}
    folder(
        tmp_path / "in",
        {"text.onnx": b"t", "vision.onnx": b"v", "other.onnx": b"o", "genai_config.json": json.dumps(config).encode()},
    )
    api.convert(tmp_path / "in", tmp_path / "out")
    assert conversions == [(tmp_path / "in", "text.onnx")]


def test_a_local_file_and_a_file_deeper_in_a_folder(tmp_path, conversions):
    folder(tmp_path, {"in/a/b/model.onnx": b"deep"})
    api.convert(tmp_path / "in", tmp_path / "one", file="a/b/model.onnx")
    api.convert(tmp_path / "in/a/b/model.onnx", tmp_path / "two")
    assert conversions == [(tmp_path / "in", "a/b/model.onnx"), (tmp_path / "in/a/b", "model.onnx")]


def test_a_companion_that_is_a_link_out_of_the_folder_is_refused(tmp_path, conversions):
    template = "additional_chat_templates/x.jinja"
    folder(tmp_path, {"secret": b"x", "in/model.onnx": b"x", f"in/{template}": b""})
    (tmp_path / "in" / template).unlink()
    (tmp_path / "in" / template).symlink_to(tmp_path / "secret")
    source = Source("in", ("model.onnx", template), tmp_path / "in")
    with pytest.raises(FolderError, match="a file inside its folder"):
        fetch_model_files(source, "model.onnx")


@pytest.mark.parametrize("case", ["below a blob", "blobs elsewhere"])
def test_only_the_blobs_of_the_snapshot_itself_may_be_linked_to(case, tmp_path):
    folder(tmp_path, {"repo/blobs/a/b": b"x", "repo/snapshots/c/keep": b"", "other/abc": b"x"})
    link = tmp_path / "repo/snapshots/c/model.onnx"
    if case == "below a blob":
        link.symlink_to("../../blobs/a/b")
    else:
        (tmp_path / "moved/snapshots/c").mkdir(parents=True)
        (tmp_path / "moved/blobs").symlink_to(tmp_path / "other")
        link = tmp_path / "moved/snapshots/c/model.onnx"
        link.symlink_to("../../blobs/abc")
    assert link.is_file()
    assert leaves_folder(link, link.parent)


def test_a_link_out_of_the_folder_is_refused(tmp_path, conversions):
    folder(tmp_path, {"secret.onnx": b"x", "in/config.json": b"{}"})
    (tmp_path / "in/model.onnx").symlink_to(tmp_path / "secret.onnx")
    with pytest.raises(FolderError, match="expected a file inside its folder"):
        api.convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert conversions == []


def test_the_links_of_a_hub_snapshot_are_allowed_and_no_others(tmp_path, conversions):
    folder(tmp_path, {"repo/blobs/abc": b"x", "repo/refs/main": b"c", "repo/snapshots/c/onnx/keep": b""})
    link = tmp_path / "repo/snapshots/c/onnx/model.onnx"
    link.symlink_to("../../../blobs/abc")
    api.convert(tmp_path / "repo/snapshots/c", tmp_path / "out")
    link.unlink()
    link.symlink_to("../../../refs/main")
    with pytest.raises(FolderError, match="a file inside its folder"):
        api.convert(tmp_path / "repo/snapshots/c", tmp_path / "out")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("./nowhere", {}, "no such folder"),
        (Path("nowhere"), {}, "no such folder"),
        ("a/b/c", {}, "no such folder"),
        ("sp ace/x", {}, "no such folder, and no repository id"),
        ("here", {"revision": "main"}, "revision 'main' of a local folder"),
        ("here/config.json", {}, "a file"),
        ("user/name", {"revision": "../../x"}, "revision '../../x'"),
    ],
)
def test_a_source_that_is_none_is_one_clear_line(tmp_path, monkeypatch, source, options, message):
    folder(tmp_path, {"here/config.json": b"{}"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=message) as error:
        api.load(source, **options)
    assert "\n" not in str(error.value)


# What becomes of `out`.


def test_convert_refuses_a_folder_with_something_else(tmp_path, conversions):
    source = folder(tmp_path / "in", {"model.onnx": b"x"})
    for out in [folder(tmp_path / "full", {"diary.txt": b"dear"}), folder(tmp_path, {"file": b""}) / "file", source]:
        with pytest.raises(SourceError, match="exists and holds something else"):
            api.convert(source, out)
    assert (tmp_path / "full/diary.txt").read_bytes() == b"dear"
    assert conversions == []


def test_what_is_converted_is_not_converted_again(tmp_path, conversions):
    done = folder(tmp_path / "done", {"program.json": b"{}", "model.safetensors": b""})
    with pytest.raises(SourceError, match="already converted"):
        api.convert(done, tmp_path / "out")
    with pytest.raises(SourceError, match="already converted"):
        api.load(done, dtype="q4")
    assert api.load(done) == done
    assert conversions == []


# The cache of conversions.


def test_load_converts_once_and_again_when_the_source_changes(tmp_path, cache, conversions, capsys):
    source = folder(tmp_path / "in", {"model.onnx": external("w.data"), "w.data": b"weights", "config.json": b"{}"})
    first: Any = api.load(source)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(first) in said
    assert first.is_relative_to(cache)
    assert api.load(source) == first
    assert len(conversions) == 1
    assert capsys.readouterr().err == ""
    for changed in ["model.onnx", "w.data", "config.json"]:
        os.utime(source / changed, ns=(1, 1))
        assert api.load(source) not in (first, None)
    assert len(conversions) == 4
    folder(source, {"diary.txt": b"not read"})
    api.load(source)
    assert len(conversions) == 4


def test_a_float_type_is_no_choice_of_a_file_and_has_a_conversion_of_its_own(tmp_path, conversions):
    source = folder(tmp_path / "in", {"model.onnx": b"x", "model_fp16.onnx": b"y"})
    folders = {dtype: api.load(source, dtype=dtype) for dtype in (None, "float16", "bfloat16", "fp16")}
    assert [file for _, file in conversions] == ["model.onnx"] * 3 + ["model_fp16.onnx"]
    assert len(set(folders.values())) == 4
    assert {dtype: json.loads((one / "program.json").read_text())[2] for dtype, one in folders.items()} == {
        None: None, "float16": "float16", "bfloat16": "bfloat16", "fp16": None,
    }  # fmt: skip
    assert api.load(source, dtype="float16") == folders["float16"]
    assert len(conversions) == 4
    api.convert(source, tmp_path / "out", file="model_fp16.onnx", dtype="float32")
    assert json.loads((tmp_path / "out" / "program.json").read_text())[::2] == ["model_fp16.onnx", "float32"]
    with pytest.raises(SourceError, match=r"dtype 'floaty16'.*use \"float16\""):
        api.load(source, dtype="floaty16")


# Repositories.


def test_only_the_files_of_the_chosen_dtype_are_downloaded(tmp_path, remote, conversions):
    big = {f"onnx/model{suffix}.onnx": external(f"model{suffix}.onnx_data") for suffix in ("", "_q4", "_fp16")}
    big |= {f"{name}_data": name.encode() for name in big} | {"onnx/model_q4.onnx_data_1": b"more"}
    big["onnx/model_q4.onnx"] += external("model_q4.onnx_data_1") + external("../../secret")
    never = {"modeling.py": b"", "pytorch_model.bin": b"", "onnx/x.pt": b"", "README.md": b"", "model.safetensors": b""}
    remote.add(
        "user/name", folder(tmp_path / "repo", {**big, **never, **CONFIG, "additional_chat_templates/t.jinja": b"t"})
    )
    loaded: Any = api.load("user/name", dtype="q4")
    wanted = {*CONFIG, "additional_chat_templates/t.jinja"} | {name for name in big if "_q4" in name}
    assert remote.downloaded() == wanted
    ((origin, file),) = conversions
    assert file == "onnx/model_q4.onnx"
    assert "user--name" in loaded.name
    assert {str(path.relative_to(origin)) for path in origin.rglob("*") if path.is_file()} == wanted


@pytest.mark.slow
def test_what_is_here_needs_no_hub(tmp_path, remote, conversions):
    remote.add("user/name", folder(tmp_path / "repo", {"onnx/model.onnx": b"x", "onnx/model_q4.onnx": b"y", **CONFIG}))
    first = api.load("user/name")
    asked = len(remote.asked)
    assert api.load("user/name") == first
    assert len(conversions) == 1
    assert len(remote.asked) == asked
    remote.stop()
    assert api.load("user/name") == first
    assert api.load("user/name", revision=remote.repositories["user/name"].commit) == first
    api.convert("user/name", tmp_path / "out")  # the snapshot is still there as well
    with pytest.raises(SourceError, match="the hub at http"):
        api.load("user/name", dtype="q4")


def test_another_dtype_of_a_known_commit_comes_from_that_commit(tmp_path, remote, conversions):
    files = {"onnx/model.onnx": b"x", "onnx/model_q4.onnx": b"y"}
    repository = remote.add("user/name", folder(tmp_path / "repo", files))
    api.load("user/name", dtype="fp32")
    api.load("user/name", dtype="q4")
    assert [file for _, file in conversions] == ["onnx/model.onnx", "onnx/model_q4.onnx"]
    repository.files["onnx/model_q4.onnx"] = b"newer"
    with pytest.raises(SourceError, match="no revision"):  # the stand-in forgets old commits
        api.load("user/name", revision="0" * 40)
    loaded: Any = api.load("user/name", dtype="q4")
    assert loaded.is_dir()
    assert len(conversions) == 2


def test_a_converted_repository_loads_as_it_is(tmp_path, remote, conversions):
    files = {"program.json": b"{}", "model.safetensors": b"w", "evil.py": b"", "onnx/model.onnx": b"", **CONFIG}
    remote.add("user/done", folder(tmp_path / "repo", files))
    loaded = api.load("user/done")
    assert remote.downloaded() == {"program.json", "model.safetensors", *CONFIG}
    assert (loaded / "program.json").is_file()
    assert conversions == []


def test_names_that_leave_the_folder_are_not_fetched(tmp_path, remote, conversions):
    escaping = ["../config.json", "/etc/config.json", "onnx/../../tokenizer.json", "..\\config.json"]
    remote.add("user/name", folder(tmp_path / "repo", {"onnx/model.onnx": b"x"}), listed=escaping)
    api.load("user/name")
    assert remote.downloaded() == {"onnx/model.onnx"}
    with pytest.raises(SourceError, match="no file"):
        api.load("user/name", file="onnx/../../x.onnx")


@pytest.mark.parametrize("case", ["missing", "gated", "revision", "offline", "down", "no_onnx"])
def test_a_repository_that_gives_no_model_is_one_clear_line(tmp_path, remote, monkeypatch, conversions, case):
    from huggingface_hub import constants

    remote.add("user/name", folder(tmp_path / "repo", {"model.onnx": b"x"}), gated=case == "gated")
    remote.add("user/other", folder(tmp_path / "other", {"pytorch_model.bin": b"x"}))
    if case == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if case == "down":
        remote.stop()
    source = {"missing": "user/nothing", "no_onnx": "user/other"}.get(case, "user/name")
    messages = {
        "missing": "user/nothing: found no such folder and no such repository",
        "gated": "user/name: found a gated repository",
        "revision": "no revision 'v9'",
        "offline": r"offline \(HF_HUB_OFFLINE\)",
        "down": "the hub at http://127.0.0.1.*if a folder was meant, there is none of that name",
        "no_onnx": "no ONNX file among pytorch_model.bin",
    }
    with pytest.raises(SourceError, match=messages[case]) as error:
        api.load(source, revision="v9" if case == "revision" else None)
    assert "\n" not in str(error.value)
    assert conversions == []


def test_offline_a_snapshot_of_another_tool_will_do(tmp_path, remote, monkeypatch, conversions):
    import huggingface_hub
    from huggingface_hub import constants

    remote.add("user/name", folder(tmp_path / "repo", {"onnx/model_q4.onnx": b"x", "onnx/model.onnx": b"y", **CONFIG}))
    huggingface_hub.hf_hub_download("user/name", "onnx/model_q4.onnx")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    api.load("user/name")
    assert [file for _, file in conversions] == ["onnx/model_q4.onnx"]


# What another tool downloaded, so that no listing of the repository is known.


@pytest.fixture
def snapshot(tmp_path, monkeypatch, cache):
    """The snapshot of a commit that is main, as other tools leave it, whole but for what a test takes away."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # a request of its own, once a day
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = {"onnx/model.onnx": external("w.data"), "onnx/w.data": b"w", **CONFIG}
    place = tmp_path / "hub/models--user--name"
    folder(place, {"refs/main": COMMIT.encode()})
    return folder(place / "snapshots" / COMMIT, files)


COMMIT = "c0ffee" * 6 + "beef"


@pytest.mark.parametrize(
    ("wish", "taken", "requests"),
    [
        ({}, [], 0),
        ({"dtype": "bfloat16"}, [], 0),
        ({"file": "onnx/model.onnx"}, [], 0),
        ({"dtype": "q4"}, [], 1),
        ({}, ["onnx/w.data"], 1),
        ({}, ["tokenizer.json"], 1),
        ({}, ["onnx/model.onnx"], 1),
    ],
)
def test_a_commit_whose_files_are_all_here_needs_no_connection(
    snapshot, monkeypatch, conversions, capsys, wish, taken, requests
):
    from huggingface_hub import constants

    for name in taken:
        (snapshot / name).unlink()
    with broken_hub(resets=True) as (url, received):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        for _ in range(2):
            received.clear()
            with contextlib.suppress(SourceError) if wish or taken else contextlib.nullcontext():
                api.load("user/name", revision=COMMIT, **wish)
            assert len(received) == requests
    assert (f"the hub at {url} gave" in capsys.readouterr().err) == bool(requests)
    assert len(conversions) == ("dtype" not in wish or wish["dtype"] != "q4") * ("onnx/model.onnx" not in taken)


@pytest.mark.parametrize("resets", [True, False])
def test_a_hub_that_does_not_answer_costs_a_branch_one_short_request(
    snapshot, monkeypatch, conversions, capsys, resets
):
    from huggingface_hub import constants

    monkeypatch.setattr(hub, "SECONDS_FOR_A_CACHED_REPOSITORY", 0.4)
    with broken_hub(resets=resets) as (url, received):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        start = time.monotonic()
        first = api.load("user/name")
        assert time.monotonic() - start < 5  # of the client's 10 seconds for a repository that is not here
        assert received == [b"GET /api/models/user/name/revision/main HTTP/1.1"]
        assert f"the hub at {url} gave" in capsys.readouterr().err
        assert api.load("user/name") == first
        assert len(received) == 2
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert api.load("user/name") == first
        assert len(received) == 2
    assert len(conversions) == 1


def test_a_branch_is_asked_once_for_its_listing(snapshot, remote, tmp_path, conversions):
    moved = remote.add("user/name", folder(tmp_path / "repo", {"onnx/model.onnx": b"newer", **CONFIG}))
    loaded: Any = api.load("user/name")
    assert json.loads((loaded / "program.json").read_text())[1] == "newer"
    asked = len(remote.asked)
    assert api.load("user/name") == loaded
    assert api.load("user/name", revision=moved.commit) == loaded
    assert len(remote.asked) == asked
