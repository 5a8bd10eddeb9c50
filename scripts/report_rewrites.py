"""Writes docs/rewrites.md: how many nodes each rewrite replaces in the models of the tests, and how far logits move."""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
HEAD = """# Rewrites, model by model

Written by `scripts/report_rewrites.py` from the models of the tests (two or three layers each). *nodes*: read from the
file → left after the rewrites. *mode*: the cache mode of the graph, and how it runs where that differs from other
models. *error*: the largest difference of logits from those of the unrewritten graph, relative to their spread: in that
mode, and over pools. Each further column counts the nodes that one rewrite replaced.

"""


def main() -> None:
    mx.disable_compile()
    rows, names = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for source in sorted(path.parent for path in FIXTURES.glob("*/model.onnx")):
            folder = convert(source, "model.onnx", Path(temporary) / source.name, progress=False)
            program = load_folder(folder).decoder.program
            meta = program.metadata
            names = [record["name"].replace("_", " ") for record in meta["rewrites"]]
            plan, tried, nodes = (
                RunPlan.from_program(program, DecoderSignature.from_program(program)).label,
                meta["proof"]["tried"],
                meta["nodes"],
            )
            pools = f"{tried['pools']:.0e}" if "pools" in tried else "—"
            counts = " | ".join(str(record["held"] or "") for record in meta["rewrites"])
            row = (source.name, f"{nodes['read']} → {nodes['kept']}", plan, f"{tried[plan]:.0e}", pools, counts)
            rows.append(f"| {' | '.join(row)} |")
    columns = ["model", "nodes", "mode", "error", "over pools", *names]
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows]
    (ROOT / "docs" / "rewrites.md").write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
