"""The command line, `mlx-transmuter`: runs a command, and makes one line and an exit code of an error."""

from __future__ import annotations

import os
import signal
import sys

# All else is imported by functions, under the care that `main` takes of Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = 1, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C.

    An error is one line on stderr; with MLX_TRANSMUTER_DEBUG=1 it is raised as it is.
    """
    _prepare_streams()
    if os.environ.get("MLX_TRANSMUTER_DEBUG") == "1":
        return _run_command(argv)
    try:
        return _run_command(argv)
    except KeyboardInterrupt:
        _print_error("\n")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        code = EXIT_PIPE_CLOSED
    except Exception as error:
        _print_error(f"mlx-transmuter: {_error_line(error)}\n")
        code = EXIT_FAILURE
    _discard_unwritable_output()
    return code


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    from mlx_transmuter.cli import arguments

    return arguments.build_parser()


def _run_command(argv: Sequence[str] | None) -> int:
    # While modules are imported there is nothing to clean up, and a KeyboardInterrupt could be lost in a callback or
    # become another error. Where Ctrl-C is ignored, as in a background job, it stays so.
    raises_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises_interrupt:
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        args = build_parser().parse_args(argv)
        _check_machine()
        run = args.import_command()
    except SystemExit:
        sys.stdout.flush()  # of --help; here a closed pipe has an exit code
        raise
    finally:
        if raises_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    _end_on_signals()
    code = run(args)
    sys.stdout.flush()
    return code


def _end_on_signals() -> None:
    """Lets a request to end, or a terminal that is closed, end the command as Ctrl-C does, so that partial folders go.

    The exit code is the shell's for the signal: 143, 129. A signal that is ignored, as under nohup, stays so.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, lambda signum, _: sys.exit(128 + signum))


def _prepare_streams() -> None:
    """Puts /dev/null where stdin, stdout or stderr was closed by the caller, and lets a stream replace what it cannot
    encode.

    Python has None for a closed stream, for which print takes stdout; a file opened later would get its number, and
    what a library in C prints to stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 it is open to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _exit_at_once(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


def _check_machine() -> None:
    import platform

    if platform.system() == "Darwin" and platform.machine() != "arm64":
        raise OSError(f"MLX needs a native arm64 Python on Apple silicon; this one is {platform.machine()} (Rosetta?)")


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # stderr has no reader; the exit code says it
        pass


def _discard_unwritable_output() -> None:
    """Sends what stdout and stderr cannot write to /dev/null, or Python would complain of it at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _error_line(error: Exception) -> str:
    """One line for any error: our own say all that is needed, others are named."""
    import errno

    from mlx_transmuter.errors import TransmuterError, printable_text

    if isinstance(error, OSError):
        filename = printable_text(error.filename or "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk{f' for {filename}' if filename else ''}"
        return f"{filename}: {error.strerror}" if filename else printable_text(error)
    if isinstance(error, TransmuterError):
        return str(error)  # its fields are printable
    return f"{type(error).__name__}: {printable_text(error)} (MLX_TRANSMUTER_DEBUG=1 shows where)"
