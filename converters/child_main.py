"""What the child process of a conversion runs: the request on stdin, its messages on stdout, a line of JSON each."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from mlx_transmuter.converters import pipeline
from mlx_transmuter.converters.errors import convert_errors
from mlx_transmuter.converters.stages import listening
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.precision_options import PrecisionOptions, Quantization

_SECONDS_BETWEEN_SIGNS = 1.0
_SECONDS_BETWEEN_LOOKS = 0.2
# What Linux counts although nothing is in it: the stacks of threads, the buffers of a BLAS, the heaps of malloc.
_RESERVED_BYTES = 2**29


def main(request: dict[str, Any]) -> None:
    """Converts as the request says (see `child_process`), sends the result, and ends the process."""
    messages = _take_stdout()
    limit_resources(request["max_bytes"], lambda found: _send_and_exit(messages, {"memory": found}))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, request["device"])))
    path = Path(request["path"])
    with listening(StageSender(messages)):
        try:
            with convert_errors(path, Path(request["out"])):
                pipeline.fill_folder(
                    Path(request["folder"]),
                    Path(request["source"]),
                    path,
                    progress=request["progress"],
                    base_model=request["base_model"],
                    precision=read_precision(request["precision"]),
                    max_memory=request["max_bytes"],
                )
        except TransmuterError as error:
            if os.environ.get("MLX_TRANSMUTER_DEBUG") == "1":
                traceback.print_exc()
            fields = [error.where, error.found, error.expected, error.do, error.node]
            _send_and_exit(messages, {"error": [type(error).__name__, *fields]})
    _send_and_exit(messages, {"done": True})


class StageSender:
    """Sends a stage when it is entered, and while it goes on a sign of that each second."""

    def __init__(self, messages: BinaryIO):
        self._messages, self._stage, self._sent = messages, "", 0.0

    def __call__(self, stage: str) -> None:
        now = time.monotonic()
        if stage != self._stage or now > self._sent + _SECONDS_BETWEEN_SIGNS:
            self._stage, self._sent = stage, now
            _send(self._messages, {"stage": stage})


def read_precision(fields: dict[str, Any]) -> PrecisionOptions:
    """Returns the precision options of `dataclasses.asdict`."""
    quantize = fields.pop("quantize")
    return PrecisionOptions(quantize=Quantization(**quantize) if quantize else None, **fields)


def limit_resources(max_bytes: int, exceeded: Callable[[str], None]) -> None:
    """Lets this process have so many bytes of memory and leave no core dump.

    Linux counts what is allocated and refuses more: numpy and MLX then raise. Elsewhere a thread looks at what the
    process and MLX have had, and calls `exceeded` with a text of it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = max_bytes + _RESERVED_BYTES
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    else:
        threading.Thread(target=_watch_memory, args=(max_bytes, exceeded), daemon=True).start()


def _watch_memory(max_bytes: int, exceeded: Callable[[str], None]) -> None:
    while True:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        used = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, mx.get_peak_memory())  # macOS counts bytes
        if used > max_bytes:
            exceeded(f"{used} bytes of memory in use")


def _exit_with_parent() -> None:
    """Ends the process when the other end of stdin is closed: the parent is gone, or wants no result any more."""
    os.read(0, 1)
    os._exit(1)


def _take_stdout() -> BinaryIO:
    """Returns stdout for messages; whatever else is printed there goes to stderr from now on."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a reader there is nobody to convert for
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 it is open to the end
    os.dup2(2, 1)
    return messages


def _send(messages: BinaryIO, message: dict[str, Any]) -> None:
    messages.write(json.dumps(message).encode() + b"\n")


def _send_and_exit(messages: BinaryIO, message: dict[str, Any]) -> None:
    """Sends the last message. The process ends at once: nothing that it has must be put in order."""
    sys.stderr.flush()
    _send(messages, message)
    os._exit(0)
