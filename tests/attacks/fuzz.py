"""Runs cases of `fuzzing` in worker processes, and reports what ended wrong: `python tests/attacks/fuzz.py --minutes 60`.

A worker that dies or stands still is a finding of its case; the next worker goes on with the next case. Each batch runs
twice with memory that is filled with another byte (MALLOC_PERTURB_): results that differ have read what nobody wrote.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PERTURBING_BYTES = (85, 170)
# Cases in a batch, by what a case takes.
BATCHES = {
    "graph": 60,
    "operator": 4000,
    "program": 100,
    "prompt_cache": 300,
    "tokenizer": 200,
    "template": 400,
    "settings": 400,
}
SECONDS = 60.0
# Those that are converted for a long run.
FIXTURES = ["toy", "llama", "llama_q4", "gemma2", "lfm2", "qwen3_moe", "gpt2_merged", "gpt_oss", "deltanet_ort"]


def environment(shared: Path, perturb: int) -> dict[str, str]:
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "attacks", ROOT / "tests" / "converters"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONFAULTHANDLER": "1",
        "FUZZ_SHARED": str(shared),
        "MALLOC_PERTURB_": str(perturb),
        "GLIBC_TUNABLES": f"glibc.malloc.perturb={perturb}",
        "MLX_DISABLE_COMPILE": "1",
        "MLX_TRANSMUTER_CACHE": str(shared / "cache"),
    }


@dataclass(frozen=True)
class Cases:
    """The cases of a kind with the numbers from `start` to `stop`, without `stop`."""

    kind: str
    start: int
    stop: int

    @property
    def spec(self) -> str:
        return f"{self.kind}:{self.start}:{self.stop}"


def cases_after(batch: list[Cases], kind: str, number: int) -> list[Cases]:
    """Returns the cases of the batch that come after the one of that kind and number."""
    at = next(i for i, cases in enumerate(batch) if cases.kind == kind and cases.start <= number < cases.stop)
    rest = [Cases(kind, number + 1, batch[at].stop)] if number + 1 < batch[at].stop else []
    return rest + batch[at + 1 :]


def run_cases(batch: list[Cases], shared: Path, perturb: int, seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """Yields the result of each case. A case that ends its worker, or has none after so many seconds, has a `bug`."""
    while batch:
        command = [sys.executable, "-m", "fuzzing.worker", *(cases.spec for cases in batch)]
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory(prefix="fuzz-worker.") as place:
            variables = environment(shared, perturb) | {"TMPDIR": place}
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=variables, bufsize=0)
            running = (batch[0].kind, batch[0].start)
            with child:
                for message in messages(child, seconds):
                    if "begin" in message:
                        running = tuple(message["begin"])
                    else:
                        yield message
                        batch = cases_after(batch, message["kind"], message["number"])
                is_running = child.poll() is None
                child.kill()
                code = child.wait()
            if batch:
                errors.seek(0)
                text = errors.read()[-3000:].decode("utf-8", "replace")
                end = "no result in time" if is_running and code == -signal.SIGKILL else f"exit {code}"
                yield {"kind": running[0], "number": running[1], "outcome": end, "bug": f"{end}: {text}", "seconds": 0}
                batch = cases_after(batch, *running)


def messages(child: subprocess.Popen[bytes], seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the lines of a worker, until it ends or none comes for so long, its start aside."""
    text, wait = b"", SECONDS
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while selector.select(wait):
            read = child.stdout.read(65536)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            yield from map(json.loads, lines)
            wait = seconds


class Report:
    """Counts of outcomes by kind, and the findings, in files of a folder."""

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.findings = 0

    def add(self, result: dict[str, Any]) -> None:
        with self.lock:
            self.counts[result["kind"]][result["outcome"]] += 1
            for name in ("bug", "unforeseen", "memory"):
                if name in result:
                    self.findings += name == "bug"
                    with open(self.folder / f"{name}.jsonl", "a") as file:
                        file.write(json.dumps(result) + "\n")

    def write(self) -> None:
        with self.lock:
            counts = {kind: dict(found.most_common()) for kind, found in self.counts.items()}
            (self.folder / "counts.json").write_text(json.dumps(counts, indent=1))


def compare(first: list[dict[str, Any]], second: list[dict[str, Any]], report: Report) -> None:
    """Records where two runs of the same cases differ."""
    for one, other in zip(first, second, strict=True):
        kinds_of_end = one["outcome"] == other["outcome"]
        if "bug" in one or "bug" in other or (kinds_of_end and one.get("digest") == other.get("digest")):
            continue
        report.add(
            {
                **one,
                "outcome": "differs",
                "bug": f"two runs differ: {one['outcome']} {one.get('digest')} and {other['outcome']} {other.get('digest')}",
            }
        )


def run_twice(batch: list[Cases], shared: Path, report: Report, *, once: bool = False) -> None:
    """Runs the cases and again with other bytes, and reports what came out."""
    first = list(run_cases(batch, shared, PERTURBING_BYTES[0]))
    for result in first:
        report.add(result)
    if not once:
        compare(first, list(run_cases(batch, shared, PERTURBING_BYTES[1])), report)
    report.write()


def prepare(shared: Path, names: list[str], tests: list[str]) -> None:
    """Makes what the cases share, in a process of its own: converted folders of these fixtures, and the nodes that these
    tests run.
    """
    if not (shared / "made").is_file():
        variables = environment(shared, 0) | {"HYPOTHESIS_PROFILE": "quick"}
        command = [sys.executable, "-m", "fuzzing.shared", str(shared), ",".join(names), *tests]
        subprocess.run(command, env=variables, check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--kinds", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--folder", type=Path, default=Path("fuzz-report"))
    parser.add_argument("--once", action="store_true", help="no second run with other bytes")
    args = parser.parse_args()
    folder = args.folder.absolute()
    prepare(folder / "shared", FIXTURES, [str(ROOT / "tests" / room) for room in ("ops", "onnx_backend")])
    report, until = Report(folder), time.monotonic() + 60 * args.minutes
    next_case = dict.fromkeys(args.kinds, args.start)

    def work(first_kind: int) -> None:
        turn = first_kind
        while time.monotonic() < until:
            kind = args.kinds[turn % len(args.kinds)]
            turn += 1
            with report.lock:
                start = next_case[kind]
                next_case[kind] += BATCHES[kind]
            run_twice([Cases(kind, start, start + BATCHES[kind])], folder / "shared", report, once=args.once)

    with ThreadPoolExecutor(args.workers) as pool:
        for future in [pool.submit(work, i) for i in range(args.workers)]:
            future.result()
    print((folder / "counts.json").read_text())
    print(f"{report.findings} findings in {folder / 'bug.jsonl'}" if report.findings else "no findings")
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
