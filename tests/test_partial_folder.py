"""Partial folders: gone whatever ends their process, or found stale by the next one; and what stands in the way of
writing, said of the place that the user named."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import FIXTURES

from mlx_transmuter import api
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.generation import GenerationError, PromptCache, prompt_cache_file
from mlx_transmuter.partial_folder import partial_folder, remove_stale_folders
from mlx_transmuter.program.weights import write_safetensors

HOLDER = """
import sys, time
from pathlib import Path
from mlx_transmuter.partial_folder import partial_folder
with partial_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("of a file")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to a target, and its partial folder."""
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    yield child, Path(child.stdout.readline().strip())
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_folder_is_stale_once_its_process_is_killed_and_not_before(holder, tmp_path):
    child, folder = holder
    old = tmp_path / ".out.x.partial"  # of a version without locks
    old.mkdir()
    with partial_folder(tmp_path / "out") as own:
        assert not old.exists()
        assert {folder, own} == set(tmp_path.iterdir())
        remove_stale_folders(tmp_path)
        assert {folder, own} == set(tmp_path.iterdir())
        child.kill()
        child.wait()
        remove_stale_folders(tmp_path, ".other.")
        assert folder.exists()
        with partial_folder(tmp_path / "out") as second:
            assert {second, own} == set(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_links_and_files_of_such_names_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".out.a.partial").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".out.b.partial").write_text("a file")
    before = set(tmp_path.iterdir())
    remove_stale_folders(tmp_path)
    remove_stale_folders(tmp_path / "nowhere")
    assert set(tmp_path.iterdir()) == before


def test_names_may_be_as_long_as_the_system_lets_them(tmp_path):
    for name in ("é" * 127, "a" * 255, "[*]?"):
        with partial_folder(tmp_path / name) as folder:
            folder.rename(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_load_removes_what_killed_conversions_left_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_TRANSMUTER_CACHE", str(tmp_path))
    left = tmp_path / "converted" / ".other--model--0123.abc.partial" / "model"
    left.mkdir(parents=True)
    folder = api.load(FIXTURES / "llama").folder
    assert list((tmp_path / "converted").iterdir()) == [folder]


def start_conversion(out, **options):
    args = ["convert", "--model", str(FIXTURES / "llama"), "--out", str(out)]
    child = subprocess.Popen(
        [sys.executable, "-m", "mlx_transmuter", *args], stderr=subprocess.PIPE, stdout=subprocess.PIPE, **options
    )
    while not any(out.parent.glob(".out.*.partial/model/*")):
        assert child.poll() is None
        time.sleep(0.01)
    return child


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_conversion_and_leaves_nothing(tmp_path, signum, code):
    def hear_it():
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    child = start_conversion(tmp_path / "out", preexec_fn=hear_it)
    child.send_signal(signum)
    child.communicate()
    assert child.returncode == code
    assert not list(tmp_path.iterdir())


def test_a_conversion_under_nohup_goes_on_without_its_terminal(tmp_path):
    child = start_conversion(tmp_path / "out", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    child.send_signal(signal.SIGHUP)
    child.communicate()
    assert child.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# What cannot be written.


@contextlib.contextmanager
def small_files():
    """Files have 1,000 bytes at most: a write beyond them fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux, full at every write")
def test_the_reason_that_mlx_leaves_out_of_its_error_is_the_systems(tmp_path):
    (tmp_path / "x.safetensors").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        write_safetensors(tmp_path / "x.safetensors", {"a": mx.zeros(100_000)}, {})
    assert error.value.errno == errno.ENOSPC


def test_a_limit_of_file_sizes_is_said_of_the_folder_that_the_user_named(tmp_path, monkeypatch):
    with small_files(), pytest.raises(ConvertError, match=r"a limit on the size of files.*ulimit -f") as error:
        api.convert(FIXTURES / "llama", tmp_path / "out", progress=False)
    assert error.value.where == str(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("MLX_TRANSMUTER_CACHE", str(tmp_path))
    with small_files(), pytest.raises(ConvertError, match="a limit on the size of files") as error:
        api.load(FIXTURES / "llama")
    assert Path(error.value.where).parent == tmp_path / "converted"
    assert ".partial" not in str(error.value)


def test_a_prompt_cache_that_does_not_fit_leaves_the_old_file(tmp_path, loaded, monkeypatch):
    path = tmp_path / "cache"
    path.write_text("the old file")
    monkeypatch.setattr(prompt_cache_file, "model_fingerprint", lambda _: "x" * 2000)
    cache = PromptCache(loaded("llama"))
    with small_files(), pytest.raises(GenerationError, match="a limit on the size of files") as error:
        cache.save(path)
    assert error.value.where == str(path)
    assert path.read_text() == "the old file"
    assert list(tmp_path.iterdir()) == [path]
