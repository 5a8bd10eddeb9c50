"""Measures the memory and the time of conversions and loads, each in a process of its own. Linux only.

`python scripts/measure_conversion.py MODEL [--quantize 4bit] [--dtype bfloat16] [--max-memory 2GB] [--limit 2GB]`
converts MODEL (see make_random_model.py) into a temporary folder and loads that. It prints the peaks of anonymous
memory (RssAnon, which mapped files are no part of) of the process and its children, and the seconds on the clock and
of all cores.
--limit: the RLIMIT_DATA of the process. Preload a fast BLAS, as for bench.py.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNITS = {"": 1, "MB": 10**6, "GB": 10**9}
INTERVAL = 0.005  # seconds between two looks at the memory


def anonymous_memory(pid: int) -> int:
    """Returns the bytes of anonymous memory of a process and its children, 0 for one that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return (int(found[1]) * 1024 if found else 0) + sum(anonymous_memory(int(child)) for child in children)


def run_measured(code: str, limit: int | None = None) -> tuple[str, int]:
    """Runs Python code in a process. Returns its seconds as a text and the peak of its anonymous memory in bytes."""

    def set_limit() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    begin, cpu, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
    process = subprocess.Popen([sys.executable, "-c", code], preexec_fn=set_limit)
    while process.poll() is None:
        peak = max(peak, anonymous_memory(process.pid))
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(process.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    return f"{time.perf_counter() - begin:.1f} s ({cores:.1f} s of all cores)", peak


def parse_bytes(text: str) -> int:
    """Returns the bytes of a text such as "2GB"."""
    number, unit = re.fullmatch(r"([\d.]+)(MB|GB)?", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return int(float(number) * UNITS[unit or ""])


def weight_bytes(folder: Path) -> int:
    """Returns the bytes of the safetensors of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    """Measures one conversion and one load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantize")
    parser.add_argument("--dtype")
    parser.add_argument("--max-memory")
    parser.add_argument("--limit", type=parse_bytes)
    args = parser.parse_args()
    options = {"quantize": args.quantize, "dtype": args.dtype, "max_memory": args.max_memory}
    keywords = "".join(f", {name}={value!r}" for name, value in options.items() if value)
    base, _ = run_measured("import mlx_transmuter, mlx_transmuter.converters.pipeline")
    with tempfile.TemporaryDirectory(dir=args.model.parent) as temporary:
        out = Path(temporary) / "converted"
        convert = (
            f"import mlx_transmuter as mt; mt.convert({str(args.model)!r}, {str(out)!r}, progress=False{keywords})"
        )
        seconds, peak = run_measured(f"import mlx_transmuter as mt; {convert}", args.limit)
        size = weight_bytes(out)
        print(f"convert: {seconds}, peak {peak / 1e6:.0f} MB, weights {size / 1e6:.0f} MB", flush=True)
        seconds, peak = run_measured(f"import mlx_transmuter as mt; mt.load({str(out)!r})", args.limit)
        print(f"load: {seconds}, peak {peak / 1e6:.0f} MB (imports alone {base})")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))
    main()
