"""The target of a conversion: what it may replace, and that an error at any stage leaves it as it was."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy
from conversions import assert_refused, convert_model, folder_contents

from mlx_transmuter.converters import pipeline, source_graph
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.converters.proof import proof, rewrite_search
from mlx_transmuter.program import weights

IDS = [3, 1, 15, 7]


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "models" / "out"


# Targets.


def test_a_converted_folder_is_replaced(source, out, tmp_path):
    convert_model(source, out)
    (out / "stale.txt").write_text("of the old conversion")
    other = toy.write(tmp_path / "other", toy.decoder(seed=5))
    convert_model(other, out)
    np.testing.assert_allclose(
        toy.converted_logits(out, IDS), toy.onnxruntime_logits(other / "model.onnx", IDS), atol=1e-4
    )
    assert not (out / "stale.txt").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_empty_folder_is_filled(source, out):
    out.mkdir(parents=True)
    convert_model(source, out)
    assert (out / "program.json").is_file()


@pytest.mark.parametrize("relative", [False, True])
def test_the_current_folder_is_refused_before_any_work(source, out, monkeypatch, relative):
    out.mkdir(parents=True)
    monkeypatch.chdir(out)
    with pytest.raises(ConvertError, match=r"the current folder.*name one inside it"):
        convert_model(source, Path(".") if relative else out)
    assert list(out.parent.iterdir()) == [out]


def test_a_folder_with_other_files_is_refused(source, out):
    out.mkdir(parents=True)
    (out / "thesis.tex").write_text("years of work")
    assert_refused(source, out, "no converted folder")
    (out / "program.json").write_text('{"schedule": []}')  # somebody else's program
    assert_refused(source, out, "no converted folder")
    shutil.rmtree(out)
    out.write_text("a file")
    assert_refused(source, out, "no converted folder")
    out.unlink()
    out.symlink_to("nowhere")
    assert_refused(source, out, "no converted folder")


def test_the_folder_of_the_source_is_never_replaced(source, tmp_path):
    convert_model(source, tmp_path / "old")
    for place in (tmp_path / "old", tmp_path / "old" / "onnx"):
        place.mkdir(exist_ok=True)
        shutil.copy(source / "model.onnx", place)
        before = folder_contents(tmp_path / "old")
        with pytest.raises(ConvertError, match="no converted folder"):
            convert(place, "model.onnx", tmp_path / "old", progress=False)
        assert folder_contents(tmp_path / "old") == before


def test_a_target_that_cannot_be_written_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConvertError, match="file"):
        convert_model(source, tmp_path / "file" / "out")

    def denied(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "out")

    monkeypatch.setattr(os, "mkdir", denied)
    assert_refused(source, tmp_path / "models" / "out", "Permission denied")


# Errors in the middle of a conversion.


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
    "saving the weights": (weights, "_write_shard"),
    "loading the weights": (weights, "load"),
    "running the graph": (proof, "reference_logits"),
    "running the module": (proof, "decoder_logits"),
    "saving the program": (pipeline, "save_program"),
    "loading all again": (pipeline, "load_module"),
    "writing the card": (pipeline, "render_model_card"),
    "giving the folder its name": (Path, "rename"),
}
ERRORS = {
    "a full disk": (full, ConvertError, "a full disk"),
    "Ctrl-C": (interrupted, KeyboardInterrupt, ""),
    "no memory": (no_memory, ConvertError, "MemoryError: Unable to allocate"),
    "a file that cannot be written": (unwritable, ConvertError, "Unable to write"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_any_stage_leaves_the_target_as_it_was(source, out, tmp_path, monkeypatch, stage, kind):
    (source / "config.json").write_text("{}")
    breaks, error, match = ERRORS[kind]
    if stage == "running the module" and kind != "Ctrl-C":
        match = "disagrees with its graph"  # a mode that cannot run is not taken; here none can
    earlier = toy.write(tmp_path / "earlier", toy.decoder(seed=9))
    for before in (lambda: None, lambda: convert_model(earlier, out)):
        before()
        with monkeypatch.context() as patch:
            patch.setattr(*STAGES[stage], breaks)
            assert_refused(source, out, match, error)
    np.testing.assert_allclose(
        toy.converted_logits(out, IDS), toy.onnxruntime_logits(earlier / "model.onnx", IDS), atol=1e-4
    )


@pytest.mark.parametrize("fails", [1, 2])
def test_a_rename_that_fails_halfway_puts_the_old_folder_back(source, out, monkeypatch, fails):
    convert_model(source, out)
    before, calls, real = folder_contents(out), [], Path.rename

    def rename(self, target):
        calls.append(target)
        if len(calls) == fails:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        convert_model(source, out)
    assert folder_contents(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [0, 100, 1000, 2000])
def test_a_full_disk_leaves_no_folder(source, out, limit):
    """The system's own limit on the size of a file, which ends a write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    toy.write(source, toy.decoder())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(ConvertError):
            convert_model(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.parent.iterdir())


def test_of_two_conversions_for_the_cache_the_first_stays(source, out, monkeypatch):
    """The second, which began before the first was done, leaves the folder that others may read by now."""
    real = pipeline.render_model_card

    def overtaken(*args):
        monkeypatch.setattr(pipeline, "render_model_card", real)
        convert(source, "model.onnx", out, progress=False, replace_converted=False)
        (out / "of the first").touch()
        return real(*args)

    monkeypatch.setattr(pipeline, "render_model_card", overtaken)
    convert(source, "model.onnx", out, progress=False, replace_converted=False)
    assert (out / "of the first").is_file()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
