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
TARGET = ROOT / "docs" / "rewrites.md"
HEAD = """# Rewrites, model by model

Written by `scripts/report_rewrites.py` from the models of the tests (two or three layers each). *nodes*: read from the
file → left after the rewrites. *mode*: the cache mode of the graph, and how it runs where that differs from other
models. *error*: the largest difference of logits from those of the unrewritten graph, relative to their range: in that
mode, and over pools. Each further column counts the nodes that one rewrite replaced.

"""
# The first columns; those of the errors differ a little between machines.
COLUMNS = ("model", "nodes", "mode", "error", "over pools")
ERROR_COLUMNS = ("error", "over pools")


def table_row(name: str, folder: Path) -> dict[str, str]:
    """Returns the cells of a converted model by the names of their columns."""
    program = load_folder(folder).decoder.program
    metadata = Metadata(program.metadata)
    proof, nodes = metadata.proof, metadata.nodes
    assert proof is not None
    assert nodes is not None
    plan = RunPlan.from_program(program, DecoderSignature.from_program(program)).label
    pools = f"{proof.tried['pools']:.0e}" if "pools" in proof.tried else "—"
    cells = (name, f"{nodes.read} → {nodes.remaining}", plan, f"{proof.tried[plan]:.0e}", pools)
    counts = {rewrite.name.replace("_", " "): str(rewrite.replaced or "") for rewrite in metadata.rewrites}
    return dict(zip(COLUMNS, cells, strict=True)) | counts


def main() -> None:
    mx.disable_compile()
    with tempfile.TemporaryDirectory() as temporary:
        rows = [
            table_row(source.name, convert(source, "model.onnx", Path(temporary) / source.name, progress=False))
            for source in sorted(path.parent for path in FIXTURES.glob("*/model.onnx"))
        ]
    lines = [list(rows[-1]), ["---"] * len(rows[-1]), *(row.values() for row in rows)]
    TARGET.write_text(HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
