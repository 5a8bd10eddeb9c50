"""Makes everything under tests/fixtures: python scripts/make_fixtures.py [name ...]."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
from fixtures import architectures, exports, variants  # noqa: E402

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
import logging

import torch

logging.disable(logging.WARNING)
torch.set_num_threads(1)
for name in sys.argv[1:] or [*architectures.CONFIGS, *variants.VARIANTS]:
    line = variants.VARIANTS[name](OUT / name) if name in variants.VARIANTS else exports.make(name, OUT / name)
    print(name, line, flush=True)
