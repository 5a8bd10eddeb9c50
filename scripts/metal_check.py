"""Checks this project on the GPU of a Mac and prints one page to paste into a report.

    make metal-check                                  # or: python scripts/metal_check.py [MODEL ...]

It runs the reference tokens and logits with compiled steps, the tests that no step copies a pool, and a benchmark of
the demo and of each MODEL that `mlx_transmuter.load` takes: five minutes with the demo alone. Exits with 1 where a
test fails. --device cpu runs the same where there is no Mac.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TESTS = {
    "reference tokens and logits": ["tests/test_goldens.py", "tests/test_old_folders.py"],
    "no step copies a pool": ["tests/test_steps.py", "-k", "copies_no_pool"],
    "rows, windows, drafts and quantized pools": [
        *(
            "tests/test_windows.py",
            "tests/test_packed_prefill.py",
            "tests/test_drafts.py",
            "tests/test_quantized_pools.py",
        ),
        *("-m", "not slow"),
    ],
}
# Prompt tokens and rows of the benchmark's cases, and how many tokens each decodes.
CASES = [(31, 1), (64, 1), (64, 4), (256, 1)]
NEW_TOKENS = 64


def run_tests(device: str) -> dict[str, tuple[bool, str]]:
    """Returns, by the name of each set of tests, whether it passed, and pytest's last line with the failures' names."""
    results = {}
    for name, arguments in TESTS.items():
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=line", "-q", *arguments],
            cwd=ROOT,
            env={**os.environ, "MLX_TRANSMUTER_TEST_DEVICE": device, "HYPOTHESIS_PROFILE": "quick"},
            capture_output=True,
            text=True,
        )
        lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["no output"]
        failed = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
        results[name] = (done.returncode == 0, "; ".join([lines[-1], *failed[:20]]))
        print(f"{name}: {lines[-1]}", file=sys.stderr, flush=True)
    return results


def benchmark(source: str | None) -> list[dict[str, Any]]:
    """Returns for each case of a model, the demo by default: seconds to the first token, with compilation ("cold") and
    without, tokens decoded per second over all rows, steps compiled, and the peak of memory in MB.
    """
    import mlx.core as mx

    from mlx_transmuter import api, generation

    model = api.load(source) if source else api.load(str(ROOT / "mlx_transmuter" / "demo"))
    results = []
    for length, rows in CASES:
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": []}
        gen = generation.compile(generation.context(model, **settings), rows)
        prompts = [[3 + (row + 7 * i) % 200 for i in range(length)] for row in range(rows)]
        mx.reset_peak_memory()
        first, rates = [], []
        for _ in range(4):
            start = time.perf_counter()
            steps = generation.generate_steps(gen, prompts, list(range(rows)))
            next(steps)
            first.append(time.perf_counter() - start)
            generation.run_to_end(steps)
            rates.append(rows * (NEW_TOKENS - 1) / (time.perf_counter() - start - first[-1]))
        results.append(
            {
                "prompt": length,
                "rows": rows,
                "first token, cold (s)": f"{first[0]:.3f}",
                "first token (s)": f"{min(first[1:]):.4f}",
                "decoded tokens/s": f"{max(rates[1:]):.0f}",
                "steps compiled": gen.compilation_count,
                "peak (MB)": f"{mx.get_peak_memory() / 1e6:.0f}",
            }
        )
    return results


def render_page(tests: dict[str, tuple[bool, str]], benchmarks: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the page, in Markdown."""
    import mlx.core as mx

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    device = mx.device_info()
    lines = [
        "## mlx-transmuter on this machine",
        "",
        f"- {platform.platform()}, {device.get('device_name', platform.machine())}, Python {platform.python_version()}",
        f"- mlx {version('mlx')}, default device {mx.default_device()}, commit {commit.strip() or 'unknown'}",
        *(f"- {key}: {device[key]}" for key in ("memory_size", "max_recommended_working_set_size") if key in device),
        "",
        "| tests | passed | outcome |",
        "|---|---|---|",
        *(f"| {name} | {'yes' if passed else '**no**'} | {outcome} |" for name, (passed, outcome) in tests.items()),
    ]
    for name, rows in benchmarks.items():
        lines += ["", f"**{name}**, {NEW_TOKENS} new tokens, greedy:", "", "| " + " | ".join(rows[0]) + " |"]
        lines += ["|" + "---|" * len(rows[0]), *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)]
    return "\n".join(lines)


def main() -> int:
    """Prints the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--no-tests", action="store_true", help="the benchmark alone")
    args = parser.parse_args()
    import mlx.core as mx

    if args.device == "gpu" and not mx.metal.is_available():
        print("MLX finds no GPU of a Mac here; --device cpu runs the same on the CPU", file=sys.stderr)
        return 2
    mx.set_default_device(mx.Device(mx.gpu if args.device == "gpu" else mx.cpu))
    tests = {} if args.no_tests else run_tests(args.device)
    benchmarks = {"the demo": benchmark(None), **{model: benchmark(model) for model in args.models}}
    print(render_page(tests, benchmarks))
    return int(not all(passed for passed, _ in tests.values()))


if __name__ == "__main__":
    sys.exit(main())
