"""The process of a conversion: what ends it is an error of the caller's process, which lives and has no half-written folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
import toy
from conversions import folder_contents

from mlx_transmuter import api
from mlx_transmuter.converters import child_process, pipeline
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.precision_options import PrecisionOptions, Quantization
from mlx_transmuter.tokenizer import TokenizerError

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "fixtures" / "llama"


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    monkeypatch.delenv(child_process.IN_PROCESS_VARIABLE)
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")


@pytest.fixture
def source(tmp_path):
    return toy.write(tmp_path / "source", toy.decoder())


def test_a_child_converts_as_this_process_does(tmp_path):
    precision = PrecisionOptions(dtype="float16", quantize=Quantization(bits=8, group_size=32))
    for convert, name in ((child_process.convert, "child"), (pipeline.convert, "here")):
        convert(LLAMA, "model.onnx", tmp_path / name, progress=False, base_model="user/name", precision=precision)
    assert folder_contents(tmp_path / "child") == folder_contents(tmp_path / "here")


def test_an_error_of_the_child_has_its_type_and_its_fields(source, tmp_path):
    model = onnx.load(str(source / "model.onnx"))
    model.graph.node[3].op_type = "NoSuchOperator"
    onnx.save(model, str(source / "model.onnx"))
    errors = []
    for convert in (child_process.convert, pipeline.convert):
        with pytest.raises(ConvertError) as raised:
            convert(source, "model.onnx", tmp_path / "out", progress=False)
        errors.append(vars(raised.value))
    assert errors[0] == errors[1]
    toy.write(source, toy.decoder())
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError):
        child_process.convert(source, "model.onnx", tmp_path / "out", progress=False)
    assert os.listdir(tmp_path) == ["source"]


# What a child may do: it sends its stage, and then is at an end.
HEAD = """
import json, os, sys, time
request = json.loads(sys.stdin.buffer.raw.readline())
open(request["folder"] + "/program.json", "w").write("half")
print(json.dumps({"stage": "running the graph"}), flush=True)
sys.path[:] = request["sys_path"]
"""
ENDS = {
    "a segmentation fault": ("import ctypes; ctypes.string_at(0)", r"signal 11, SIGSEGV .*\(running the graph\)"),
    "an abort": ("os.abort()", "signal 6, SIGABRT"),
    "a division by zero": ("os.kill(os.getpid(), 8)", "signal 8, SIGFPE"),
    "the system's lack of memory": ("os.kill(os.getpid(), 9)", "as the system does where memory runs out"),
    "an exit": ("os._exit(3)", "exit code 3"),
    "a traceback": ("sys.stderr = open(os.devnull, 'w'); raise KeyError", "exit code 1"),
    "an endless loop": ("while True: pass", r"stood still for 4 seconds \(running the graph\)"),
    "an endless sleep": ("time.sleep(600)", "stood still for 4 seconds"),
    "memory": ("print(json.dumps({'memory': '9 bytes'}), flush=True); time.sleep(600)", "9 bytes .*at most [0-9]+"),
}


@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_the_child_is_one_error(source, tmp_path, monkeypatch, end):
    code, message = ENDS[end]
    monkeypatch.setattr(child_process, "_PROGRAM", HEAD + code)
    if "endless" in end:
        run_child = child_process.run_child
        monkeypatch.setattr(child_process, "run_child", lambda request, path: run_child(request, path, 4))
    out = pipeline.convert(source, "model.onnx", tmp_path / "out", progress=False)
    before = folder_contents(tmp_path)
    with pytest.raises(ConvertError, match=message) as raised:
        child_process.convert(source, "model.onnx", out, progress=False)
    assert str(source / "model.onnx") in str(raised.value)
    assert folder_contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_child_that_goes_on_slowly_is_left_alone(source, tmp_path, monkeypatch):
    slow = "for i in range(12): time.sleep(0.5); print(json.dumps({'stage': 'reading'}), flush=True)\nprint('{\"done\": true}', flush=True)"
    monkeypatch.setattr(child_process, "_PROGRAM", HEAD + slow)
    run_child = child_process.run_child
    monkeypatch.setattr(child_process, "run_child", lambda request, path: run_child(request, path, 4))
    child_process.convert(source, "model.onnx", tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "program.json").read_text() == "half"


def test_a_graph_that_asks_for_more_memory_than_there_is_harms_nobody(source, tmp_path, monkeypatch):
    """Many results, none of them larger than a value may be: together they have more than the child may."""
    take = "from mlx_transmuter.converters.child_main import limit_resources\nlimit_resources(2**29, lambda found: os.abort())\nheld = [bytes(2**26) for _ in range(64)]"
    monkeypatch.setattr(child_process, "_PROGRAM", HEAD + "sys.stderr = open(os.devnull, 'w')\n" + take)
    with pytest.raises(ConvertError, match=r"exit code 1|SIGABRT"):
        child_process.convert(source, "model.onnx", tmp_path / "out", progress=False)


def test_what_is_printed_in_the_child_disturbs_no_message(source, tmp_path, monkeypatch, capfd):
    noise = "import mlx_transmuter.converters.pipeline as p; fill = p.fill_folder; p.fill_folder = lambda *a, **k: (print('noise', flush=True), os.write(1, b'more'), fill(*a, **k))\n"
    real = child_process._PROGRAM
    monkeypatch.setattr(child_process, "_PROGRAM", real.replace("from mlx_", f"import os; {noise}from mlx_"))
    child_process.convert(source, "model.onnx", tmp_path / "out", progress=False)
    assert capfd.readouterr() == ("", "noise\nmore")


# A program of a user.


def start(script: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_script_needs_no_guard_and_its_folder_is_not_imported(source, tmp_path):
    """The script stands at its top level what it does; modules of its folder have the names of what the child imports."""
    for name in ("resource", "tqdm", "mlx_transmuter"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    script = "import sys; sys.path = [p for p in sys.path if p]\nimport mlx_transmuter as mt\nprint('once')\nmt.convert('source', 'out', progress=False)\n"
    done = start(script, cwd=tmp_path)
    out, err = done.communicate(timeout=100)
    assert (done.returncode, out, err) == (0, "once\n", "")
    assert (tmp_path / "out" / "program.json").is_file()


WAITING = (
    "import time, pathlib\nfrom mlx_transmuter.converters import child_process\n"
    "child_process._PROGRAM = {program!r}\n"
    "import mlx_transmuter as mt\nmt.convert('source', 'out', progress=False)\n"
)
SLEEPING = HEAD + (
    "import threading\nfrom mlx_transmuter.converters import child_main\n"
    "threading.Thread(target=child_main._exit_with_parent, daemon=True).start()\n"
    "open('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_child_ends_with_its_parent(source, tmp_path, number):
    """Ctrl-C is a signal to all processes of the terminal; a killed parent can end nothing itself."""
    parent = start(WAITING.format(program=SLEEPING), cwd=tmp_path)
    pid = tmp_path / "pid"
    until = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)
    else:
        parent.kill()
    _, err = parent.communicate(timeout=60)
    until = time.monotonic() + 20
    while is_running(int(pid.read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(int(pid.read_text()))
    if number == signal.SIGINT:
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1, "the child has none of its own"
        assert sorted(os.listdir(tmp_path)) == ["pid", "source"]


@pytest.mark.parametrize("why", ["the user says so", "the program is frozen", "there is no Python"])
def test_a_program_that_cannot_start_python_converts_itself(source, tmp_path, monkeypatch, why):
    if why == "the user says so":
        monkeypatch.setenv(child_process.IN_PROCESS_VARIABLE, "1")
    elif why == "the program is frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", None)
    monkeypatch.setattr(child_process, "start_child", None)
    api.convert(source, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "program.json").is_file()
