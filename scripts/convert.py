"""Converts a model's ONNX decoder: `mlx-transmuter convert` as a script of the checkout. See --help."""

import sys

from mlx_transmuter.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["convert", *sys.argv[1:]]))
