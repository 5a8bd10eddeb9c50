"""`mlx-transmuter convert`: a source into a folder."""

from __future__ import annotations

import argparse

from mlx_transmuter import hub


def run(args: argparse.Namespace) -> int:
    out = hub.convert(args.model, args.out, file=args.file, dtype=args.dtype, revision=args.revision)
    print(out)
    return 0
