"""Runs ONNX's node cases on MLX's CPU backend, prints what failed, and writes docs/onnx_backend.md."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import mlx.core as mx
import onnx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "onnx_backend"))

import node_cases  # noqa: E402
from exclusions import EXCLUDED, exclusion  # noqa: E402

HEAD = """# ONNX's node cases

Written by `scripts/onnx_backend.py` from the node cases of onnx {version}. Each case is read, saved as a folder, loaded
and called on MLX, once with its inputs on the device and once with all of them known on the host, and compared within
the case's own tolerance; integers must be equal. An excluded case has a reason and ends in an error that says it.

**{passed} of {total} passed, {failed} failed, {excluded} excluded.**

"""


def main() -> int:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    cases = node_cases.load()
    operators = {case.name: node_cases.operator(case) for case in cases}
    results: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for case in cases:
        excluded = exclusion(case.name)
        try:
            with tempfile.TemporaryDirectory() as folder:
                node_cases.run(case, Path(folder))
            result = "failed" if excluded else "passed"
            problem = "excluded, and passed" if excluded else ""
        except Exception as error:
            known = excluded and isinstance(error, excluded.error)
            result = "excluded" if known else "failed"
            problem = "" if known else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem:
            print(f"{case.name}: {problem}")
        if excluded:
            reasons[excluded.reason] += 1
        results[operators.get(node_cases.plain_name(case.name), operators[case.name])][result] += 1
    total = sum(results.values(), Counter())
    print(f"{total['passed']} passed, {total['failed']} failed, {total['excluded']} excluded")
    (ROOT / "docs" / "onnx_backend.md").write_text(document(results, reasons, total), encoding="utf-8")
    return int(total["failed"] > 0)


def document(results: dict[str, Counter[str]], reasons: Counter[str], total: Counter[str]) -> str:
    head = HEAD.format(
        version=onnx.__version__, total=sum(total.values()), **{k: total[k] for k in ("passed", "failed", "excluded")}
    )
    why = "".join(f"| {reasons[r]} | {r} |\n" for r in dict.fromkeys(one.reason for one in EXCLUDED))
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
