"""A conversion in a process of its own: what a hostile or broken graph does to it never reaches the caller's process.

MLX checks little of what a graph asks for: a wrong index, a size of zero or too much memory can end a process. The
caller's process keeps the temporary folder and gives it its name; the child fills it, tells its stages, and sends the
result or the fields of an error, as lines of JSON. A child that dies, grows too large or stands still is an error.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_transmuter.converters.errors import CHECK_FILE, ConvertError, convert_errors
from mlx_transmuter.converters.staging import stage_folder
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.memory import usable_memory
from mlx_transmuter.precision_options import PrecisionOptions

# Set to 1, conversions run in the caller's process: for programs that cannot start another Python.
IN_PROCESS_VARIABLE = "MLX_TRANSMUTER_IN_PROCESS"
# How long a child may show no sign of going on. The longest honest stretch is the first step of a large model, whose
# weights are read from a slow disk.
STALL_SECONDS = 1800.0
_SECONDS_BETWEEN_LOOKS = 1.0
# Isolated mode keeps Python from importing what lies in the current folder; the path is the caller's then.
_PROGRAM = """
import json, sys
request = json.loads(sys.stdin.buffer.raw.readline())
sys.path[:] = request["sys_path"]
from mlx_transmuter.converters.child_main import main
main(request)
"""


def convert(
    source: Path,
    file: str,
    out: Path,
    *,
    progress: bool = True,
    base_model: str | None = None,
    precision: PrecisionOptions = PrecisionOptions(),  # noqa: B008 it is frozen
    replace_converted: bool = True,
    max_memory: int | None = None,
) -> Path:
    """Converts as `pipeline.convert` does, in a process of its own, which gets no more memory than max_memory.

    Raises what that raises, and ConvertError for a child that a signal ended, that had too much memory, or that did not
    go on for half an hour.
    """
    if not _can_start_python():
        from mlx_transmuter.converters import pipeline

        return pipeline.convert(
            source,
            file,
            out,
            progress=progress,
            base_model=base_model,
            precision=precision,
            replace_converted=replace_converted,
            max_memory=max_memory,
        )
    source, out = Path(source), Path(out)
    path = source / file
    with convert_errors(path, out), stage_folder(out, path, replace_converted=replace_converted) as folder:
        request = {
            "sys_path": _absolute_path(),
            "source": str(source.absolute()),
            "path": str(path.absolute()),
            "folder": str(folder.absolute()),
            "out": str(out),
            "progress": progress,
            "base_model": base_model,
            "precision": asdict(precision),
            "device": mx.default_device().type.name,
            "max_bytes": max_memory or usable_memory(),
        }
        run_child(request, path)
    return out


def _can_start_python() -> bool:
    """Returns whether a child is wanted, and sys.executable is a Python: of a frozen program it is that program."""
    wanted = os.environ.get(IN_PROCESS_VARIABLE) != "1"
    return wanted and bool(sys.executable) and not getattr(sys, "frozen", False)


def _absolute_path() -> list[str]:
    """Returns the folders from which this process imports, and the one that this package lies in, which an editable
    install finds otherwise.
    """
    own = str(Path(sys.modules["mlx_transmuter"].__file__ or "").parent.parent)
    return [os.path.abspath(folder) for folder in sys.path if folder] + [own]


def run_child(request: dict[str, Any], path: Path, stall_seconds: float = STALL_SECONDS) -> None:
    """Runs the request in a child, and returns when it is done.

    Raises the child's error, or ConvertError for its end. stall_seconds: how long it may show no sign of going on.
    """
    with start_child() as child:
        stage = "starting Python"
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            for message in read_messages(child, stall_seconds):
                if "stage" in message:
                    stage = message["stage"]
                elif "done" in message:
                    return
                elif "error" in message:
                    raise rebuild_error(*message["error"])
                else:
                    raise ConvertError(
                        path,
                        f"{message['memory']} ({stage})",
                        f"at most {request['max_bytes']} for a conversion on this machine",
                        "convert it on a machine with more memory",
                    )
        except TimeoutError:
            raise ConvertError(
                path,
                f"a conversion that stood still for {stall_seconds:g} seconds ({stage})",
                "a graph that can be run",
                "convert it again on a machine with nothing else to do; if it stands still there, report it",
            ) from None
        except BrokenPipeError:
            pass
        raise ConvertError(
            path,
            f"a conversion whose process was ended by {describe_end(child.wait())} ({stage})",
            # MLX ends a process that gets no memory by a signal too.
            f"a graph that can be read and run in {request['max_bytes'] / 1e9:.1f} GB of memory",
            f"give it more memory if the model is large (--max-memory, max_memory=), else {CHECK_FILE}",
        )


# GPUs of the M5 generation multiply floats in TF32 by default, which rounds them to 11 bits: a proof needs all 24.
_CHILD_VARIABLES = {"MLX_ENABLE_TF32": "0"}


@contextmanager
def start_child() -> Iterator[subprocess.Popen[bytes]]:
    """Gives a new child that waits for its request on stdin; it is gone when the block ends, however it ends.

    Ctrl-C, a closed terminal and a request to end go to this process alone, which then ends the child: the child begins
    with these signals blocked.
    """
    options = ["-I", "-X", f"utf8={sys.flags.utf8_mode}", *(["-B"] if sys.dont_write_bytecode else [])]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
    try:
        child = subprocess.Popen(
            [sys.executable, *options, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **_CHILD_VARIABLES},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with child:
        try:
            yield child
        finally:
            child.kill()


def read_messages(child: subprocess.Popen[bytes], stall_seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the child's messages until it ends. Raises TimeoutError where none comes for so long.

    The time is counted while this process runs: after a pause (Ctrl-Z, a sleeping machine) the child gets its chance.
    """
    assert child.stdout is not None
    text, silence = b"", 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            wait = min(_SECONDS_BETWEEN_LOOKS, stall_seconds)
            if not selector.select(wait):
                silence += wait
                if silence >= stall_seconds:
                    raise TimeoutError
                continue
            read = child.stdout.read(65536)
            if not read:
                return
            silence, (*lines, text) = 0.0, (text + read).split(b"\n")
            yield from (json.loads(line) for line in lines)


def rebuild_error(name: str, *fields: str) -> TransmuterError:
    """Returns the error of this package with that name and these fields; ConvertError where this process lacks it."""
    kinds = {kind.__name__: kind for kind in TransmuterError.__subclasses__()}
    kind = kinds.get(name, ConvertError)
    error = kind.__new__(kind)
    TransmuterError.__init__(error, *fields)
    return error


def describe_end(code: int) -> str:
    """Returns what ended a process, by its return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    hint = ", as the system does where memory runs out" if -code == signal.SIGKILL else ""
    return f"signal {-code}, {name} ({signal.strsignal(-code)}){hint}"
