"""Writes docs/rewrites.md: what each rewrite does to each model of the tests, and how far its logits are from the
graph's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx

from mlx_transmuter.converters.pipeline import convert
from mlx_transmuter.model import load_folder
from mlx_transmuter.program.metadata import Metadata
from mlx_transmuter.program.run_plan import RunPlan
from mlx_transmuter.program.signature import DecoderSignature

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
HEAD = """# Rewrites, model by model

Written by `scripts/report_rewrites.py` from the models of the tests (two or three layers each). *nodes*: read from the
file, and left. *mode*: of the graph as it is, and how it runs where that is unlike others. *error*: the largest
difference of logits from the unrewritten graph's, relative to their range: in that mode, and over pools. The other
columns count what each rewrite made.

"""


def main() -> None:
    mx.disable_compile()
    rows, names = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for source in sorted(path.parent for path in FIXTURES.glob("*/model.onnx")):
            folder = convert(source, "model.onnx", Path(temporary) / source.name, progress=False)
            program = load_folder(folder).decoder.program
            metadata = Metadata(program.metadata)
            proof, nodes = metadata.proof, metadata.nodes
            assert proof is not None
            assert nodes is not None
            names = [rewrite.name.replace("_", " ") for rewrite in metadata.rewrites]
            plan = RunPlan.from_program(program, DecoderSignature.from_program(program)).label
            pools = f"{proof.tried['pools']:.0e}" if "pools" in proof.tried else "—"
            counts = " | ".join(str(rewrite.replaced or "") for rewrite in metadata.rewrites)
            row = (source.name, f"{nodes.read} → {nodes.remaining}", plan, f"{proof.tried[plan]:.0e}", pools, counts)
            rows.append(f"| {' | '.join(row)} |")
    columns = ["model", "nodes", "mode", "error", "over pools", *names]
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows]
    (ROOT / "docs" / "rewrites.md").write_text(HEAD + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
