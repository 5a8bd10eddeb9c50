"""A process that runs cases: `python -m fuzzing.worker kind:start:stop …`, a line of JSON before and after each case."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx

from fuzzing import kinds
from mlx_transmuter.converters.errors import ConvertError
from mlx_transmuter.errors import TransmuterError
from mlx_transmuter.tokenizer import template_environment

MAX_BYTES = 4 * 2**30


def run_case(kind: str, number: int, folder: Path) -> dict[str, Any]:
    """Returns the outcome of a case: "ran" with a digest, the name of our error, or what is none of ours as `bug`."""
    rng = Random(f"{kind} {number}")
    begin = time.perf_counter()
    result: dict[str, Any] = {"kind": kind, "number": number}
    try:
        result |= {"outcome": "ran", "digest": kinds.KINDS[kind](rng, folder)}
    except TransmuterError as error:
        result |= {"outcome": type(error).__name__, "digest": str(error).replace(str(folder.parent), "")}
        if "\n" in str(error) or len(str(error)) > 3000:
            result["bug"] = f"a message that is no line: {str(error)[:200]!r}"
        if unforeseen(error):
            result["unforeseen"] = f"{error} || {origin(error)}"
    except MemoryError as error:
        result |= {"outcome": "MemoryError", "memory": f"{error} || {origin(error)}"}
    except BaseException as error:
        result |= {
            "outcome": type(error).__name__,
            "bug": f"{type(error).__name__}: {str(error)[:300]} || {origin(error)}",
        }
    return result | {"seconds": round(time.perf_counter() - begin, 3)}


def unforeseen(error: TransmuterError) -> bool:
    """Whether the error is what another exception became that no check foresaw."""
    return (
        isinstance(error, ConvertError) and "report it" in error.do and not isinstance(error.__cause__, TransmuterError)
    )


def origin(error: BaseException) -> str:
    """Returns the last places of this project in the traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
    return " < ".join(frames[::-1][:4])


def main() -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    template_environment.MAX_SECONDS = 1.0  # a template may take ten, which is long for thousands of them
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    mx.set_cache_limit(0)  # what is freed goes to malloc, which fills it with the byte of MALLOC_PERTURB_
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    base = Path(tempfile.mkdtemp(prefix="fuzz."))
    elsewhere = base / "cwd"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    try:
        for spec in sys.argv[1:]:
            kind, start, stop = spec.split(":")
            for number in range(int(start), int(stop)):
                messages.write(json.dumps({"begin": [kind, number]}) + "\n")
                folder = base / "case"
                folder.mkdir()
                result = run_case(kind, number, folder)
                if os.listdir(elsewhere) or sorted(os.listdir(base)) != ["case", "cwd"]:
                    result["bug"] = f"files outside the folder: {os.listdir(elsewhere)} {os.listdir(base)}"
                    shutil.rmtree(elsewhere)
                    elsewhere.mkdir()
                    os.chdir(elsewhere)
                messages.write(json.dumps(result) + "\n")
                shutil.rmtree(folder)
    finally:
        os.chdir("/")
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
