"""Runs ONNX's node cases on MLX's CPU backend, prints what failed, and writes docs/onnx_backend.md."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import onnx
from onnx.backend.test.case.test_case import TestCase

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "onnx_backend.md"
sys.path.insert(0, str(ROOT / "tests" / "onnx_backend"))

import node_cases  # noqa: E402
from exclusions import EXCLUDED, exclusion  # noqa: E402

HEAD = """# ONNX's node cases

Written by `scripts/onnx_backend.py` from the node cases of onnx {version}. Each case is read, saved as a folder, loaded
and called on MLX, once with its inputs on the device and once with all of them known on the host, and compared within
the case's own tolerance; integers must be equal. An excluded case has a reason and must end in the expected error.

**{passed} of {total} passed, {failed} failed, {excluded} excluded.**

"""


def main() -> int:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    results, reasons = count_results(node_cases.load(), run_case)
    total = sum(results.values(), Counter())
    print(f"{total['passed']} passed, {total['failed']} failed, {total['excluded']} excluded")
    TARGET.write_text(document(results, reasons), encoding="utf-8")
    return int(total["failed"] > 0)


def run_case(case: TestCase) -> str:
    """Returns "passed", "failed" or "excluded"; prints the problem of a case that failed."""
    excluded = exclusion(case.name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            node_cases.run(case, Path(folder))
    except Exception as error:
        if excluded and isinstance(error, excluded.error):
            return "excluded"
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        if not excluded:
            return "passed"
        problem = "excluded, but passed"
    print(f"{case.name}: {problem}")
    return "failed"


def count_results(
    cases: Iterable[TestCase], result_of: Callable[[TestCase], str]
) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Returns operator -> how many of its cases have each result, and reason -> how many cases it excludes.

    result_of: a case's "passed", "failed" or "excluded".
    """
    cases = list(cases)
    operators = {case.name: node_cases.operator(case) for case in cases}
    results: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for case in cases:
        if excluded := exclusion(case.name):
            reasons[excluded.reason] += 1
        results[operators.get(node_cases.plain_name(case.name), operators[case.name])][result_of(case)] += 1
    return results, reasons


def document(results: dict[str, Counter[str]], reasons: Counter[str]) -> str:
    """Returns the text of docs/onnx_backend.md for what `count_results` returns."""
    total = sum(results.values(), Counter())
    head = HEAD.format(
        version=onnx.__version__, total=sum(total.values()), **{k: total[k] for k in ("passed", "failed", "excluded")}
    )
    why = "".join(f"| {reasons[r]} | {r} |\n" for r in dict.fromkeys(rule.reason for rule in EXCLUDED))
    rows = "".join(
        f"| {name} | {c['passed']} | {c['failed'] or ''} | {c['excluded'] or ''} |\n"
        for name, c in sorted(results.items())
    )
    return (
        f"{head}| cases | why they are excluded |\n|---|---|\n{why}\n"
        f"| operator | passed | failed | excluded |\n|---|---|---|---|\n{rows}"
    )


if __name__ == "__main__":
    sys.exit(main())
