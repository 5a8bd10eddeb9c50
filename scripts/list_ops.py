"""Writes docs/operators.md, the table of operators, from the registry: python scripts/list_ops.py"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlx_transmuter.ops.catalogue import table  # noqa: E402

(ROOT / "docs" / "operators.md").write_text(table(), encoding="utf-8")
