"""The command line, `mlx-transmuter`: runs a command, and makes one line and an exit code of an error."""

from __future__ import annotations

import errno
import io
import os
import platform
import signal
import sys
from collections.abc import Sequence

from mlx_transmuter.cli.arguments import build_parser
from mlx_transmuter.errors import TransmuterError

EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_PIPE_CLOSED = 1, 130, 143, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C.

    An error is one line on stderr; with MLX_TRANSMUTER_DEBUG=1 it is raised as it is.
    """
    args = build_parser().parse_args(argv)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal or a pipe cannot say becomes a ?
    if os.environ.get("MLX_TRANSMUTER_DEBUG") == "1":
        return args.run(args)
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # so that temporary folders go
        _check_machine()
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. What Python would flush at the end must find a place too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except Exception as error:
        print(f"mlx-transmuter: {_error_line(error)}", file=sys.stderr)
        return EXIT_FAILURE


def _check_machine() -> None:
    if platform.system() == "Darwin" and platform.machine() != "arm64":
        raise OSError(f"MLX needs a native arm64 Python on Apple silicon; this one is {platform.machine()} (Rosetta?)")


def _error_line(error: Exception) -> str:
    """One line for any error: our own say all that is needed, others are named."""
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{f' for {error.filename}' if error.filename else ''}"
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    text = " ".join(str(error).split("\n"))
    return (
        text
        if isinstance(error, TransmuterError)
        else f"{type(error).__name__}: {text} (MLX_TRANSMUTER_DEBUG=1 shows where)"
    )
