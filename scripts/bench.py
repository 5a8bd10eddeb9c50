"""Times mlx-transmuter against mlx-lm and onnxruntime on one model, in interleaved rounds, and writes
docs/benchmark.md.

    python scripts/bench.py --make            # in an environment with the extra `fixtures`: makes the model
    python scripts/bench.py                   # in one with the extra `bench`

Each contender is a process of its own with its best settings; every round runs each case once in each of them, the
prompts one after the other and then a few tokens of each in turn, so that a machine that slows down slows all.
--preload gives every contender alike what Linux lacks: MLX's wheel there links a slow reference BLAS (Debian has
libopenblas0-pthread; set OPENBLAS_CORETYPE for it), and its CPU backend asks glibc for the memory of each operation,
from two threads (jemalloc, libjemalloc2, is faster at that).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent / "benching"), str(Path(__file__).parent.parent)]
from contenders import CONTENDERS  # noqa: E402
from models import SHAPES, convert, make  # noqa: E402

CASES = [
    *({"context": n, "batch": 1, "beams": 1} for n in (64, 512, 1024, 2048)),
    *({"context": 64, "batch": n, "beams": 1} for n in (4, 16)),
    {"context": 64, "batch": 1, "beams": 4},
]
# The most tokens of the prompts of a case in which a contender takes part. MLX's CPU backend multiplies blocks of 4
# bits one row at a time, so a peer's long prompts take minutes there; the steps alone are no news beyond.
MOST = {
    "mlx-transmuter q4": 64,
    "mlx-lm q4": 64,
    "onnxruntime q4": 64,
    "steps over rows": 1024,
    "steps over pages": 1024,
}
# How many tokens a contender decodes before it is another one's turn.
TURN = 5
# Where the part of the page begins that people write; it stays.
SAID = "## What wins and what loses\n"


class Worker:
    """A contender's process."""

    def __init__(self, name: str, root: Path, preload: Sequence[str]):
        env = {**os.environ, **({"LD_PRELOAD": ":".join(preload)} if preload else {})}
        path = Path(__file__).parent / "benching" / "worker.py"
        self.process = subprocess.Popen(
            [sys.executable, str(path), name, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.load = self._answer()["load"]

    def begin(self, case: dict, new: int) -> dict:
        """Runs the prompts of the case: the seconds to the first token; of beams, those of a step too."""
        draw = np.random.default_rng(0)
        prompts = draw.integers(100, case["vocab"], (case["batch"], case["context"])).tolist()
        return self.ask(prompts=prompts, new=new, beams=case["beams"])

    def ask(self, **request: Any) -> dict:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the contender ended: {self.process.args}")
        return json.loads(line)


def measure(
    names: list[str], root: Path, rounds: int, new: int, preload: Sequence[str], vocab: int, cases: list[dict]
) -> list[dict]:
    """A row per case and contender: medians of all steps of the rounds, after one round that doesn't count.

    In a round each contender runs the prompts, then all decode a few tokens in turn, and again.
    """
    workers = {name: Worker(name, root, preload) for name in names}
    rows = []
    for case in cases:
        here = [name for name in names if case["batch"] * case["context"] <= MOST.get(name, 2**20)]
        found = {name: {"first": [], "steps": [], "hosts": []} for name in here}
        ends: dict[str, dict] = {}
        for counts in [False] + [True] * rounds:
            begun = {name: workers[name].begin({**case, "vocab": vocab}, new) for name in here}
            able = [name for name in here if "none" not in begun[name]]
            for name in able if counts else []:
                found[name]["first"].append(begun[name]["first"])
                found[name]["steps"] += begun[name].get("steps", [])
            for left in range(new - 1, 0, -TURN) if case["beams"] == 1 else []:
                for name in able:
                    answer = workers[name].ask(more=min(TURN, left))
                    if counts:  # a turn's first step wakes what slept in those of the others
                        found[name]["steps"] += answer["steps"][1:]
                        found[name]["hosts"] += answer["hosts"][1:]
            ends = {name: workers[name].ask() for name in able}
        for name in here:
            row = {**case, "contender": name, "load": workers[name].load}
            if name in ends:
                one = found[name]
                row |= {"first": median(one["first"]), "step": median(one["steps"])}
                row |= {"host": median(one["hosts"]) if one["hosts"] else None}
                row |= {key: ends[name][key] for key in ("peak", "shapes", "tokens")}
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "tokens"}), flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """The rows as Markdown. Ratios are of medians, mlx-lm's time over the contender's: above 1 is faster."""
    head = ("context", "batch", "beams", "contender", "first token s", "prompt tok/s", "vs mlx-lm", "decode tok/s",
            "vs mlx-lm", "share of the floor", "host ms", "peak GB", "load s", "shapes")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        if "step" not in row:
            continue
        quantized = row["contender"].endswith(" q4")
        peer = _other(rows, row, "mlx-lm q4" if quantized else "mlx-lm")
        floor = {} if quantized or row["contender"] == "products" else _other(rows, row, "products")
        cells = (
            row["context"],
            row["batch"],
            row["beams"],
            row["contender"],
            f"{row['first']:.2f}",
            f"{row['batch'] * row['context'] / row['first']:.0f}",
            _ratio(peer, row, "first"),
            f"{row['batch'] / row['step']:.1f}",
            _ratio(peer, row, "step"),
            _ratio(floor, row, "step"),
            "—" if row["host"] is None else f"{row['host'] * 1e3:.1f}",
            f"{row['peak'] / 1e9:.2f}",
            f"{row['load']:.2f}",
            row["shapes"] or "—",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _other(rows: list[dict], row: dict, name: str) -> dict:
    """The row of the same case of that contender, {} where there is none."""
    same = (r for r in rows if r["contender"] == name and all(r[k] == row[k] for k in ("context", "batch", "beams")))
    return next(same, {})


def _ratio(other: dict, row: dict, key: str) -> str:
    return f"{other[key] / row[key]:.2f}" if key in other else "—"


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(row["contender"] for row in rows):
        points = [
            (row["context"], 1 / row["step"])
            for row in rows
            if row["contender"] == name and row["batch"] == row["beams"] == 1
        ]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="context, tokens", ylabel="decode, tokens/s", ylim=(0, None), title="batch 1")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def versions() -> str:
    names = []
    for name in ("mlx", "mlx-lm", "onnxruntime", "numpy"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{machine}; {', '.join(names)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "mlx_transmuter_bench")
    parser.add_argument("--make", action="store_true", help="make the model and stop")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contexts", type=int, nargs="+", help="only these contexts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="new tokens a run")
    parser.add_argument("--preload", nargs="+", default=[], help="libraries to preload in every contender")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs")
    args = parser.parse_args()
    root = args.cache / args.shape
    if args.make or not (root / "onnx-q4").exists():
        make(args.shape, root)
        if args.make:
            return
    # In a process of its own: a child's peak memory begins at its parent's.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(convert, root).result()
    cases = [case for case in CASES if not args.contexts or case["context"] in args.contexts]
    rows = measure(args.contenders, root, args.rounds, args.new, args.preload, SHAPES[args.shape]["vocab_size"], cases)
    names = " and ".join(Path(library).name for library in args.preload)
    loaded = f", {names} preloaded in every contender" if names else ""
    head = f"Written by `scripts/bench.py`: a Llama of shape {args.shape}, random weights, {args.new} new tokens, "
    head += f"medians of {args.rounds} rounds in turns. {versions()}{loaded}. The floor, 'products', is the model's "
    head += "matrix products alone, those of attention among them."
    page = args.out / "benchmark.md"
    said = page.read_text().partition(SAID)[2] if page.exists() else "\n"
    text = f"# Benchmark\n\n{fill(head, 120)}\n\n{table(rows)}\n\n![decode speed over the context](benchmark.svg)\n\n"
    page.write_text(f"{text}{SAID}{said}")
    plot(rows, args.out / "benchmark.svg")


if __name__ == "__main__":
    main()
