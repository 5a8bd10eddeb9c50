"""`mlx-transmuter convert`: a source into a folder."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_transmuter import api
from mlx_transmuter.cli.inspect import describe_plan, describe_proof
from mlx_transmuter.cli.terminal import print_text
from mlx_transmuter.model import load_module
from mlx_transmuter.notices import print_notice
from mlx_transmuter.precision_options import PrecisionError, Quantization
from mlx_transmuter.program.metadata import Metadata


def run(args: argparse.Namespace) -> int:
    out = api.convert(
        args.model,
        args.out,
        file=args.file,
        dtype=args.dtype,
        revision=args.revision,
        quantize=_quantization_spec(args),
        float_activations=args.float_activations,
        max_memory=args.max_memory,
    )
    program = load_module(out).program  # its weights are not read
    if proof := Metadata(program.metadata).proof:
        print_notice(f"proved: {describe_proof(proof)}; cache mode {describe_plan(program)}")
    print_text(str(out))
    return 0


def _quantization_spec(args: argparse.Namespace) -> dict[str, Any] | None:
    """The options of --quantize that its flags set; None without it. Ends with a usage error for flags without effect
    and for values that MLX has no form of."""
    flags = {"bits": args.q_bits, "group_size": args.q_group_size, "recipe": args.quant_predicate}
    options = {name: value for name, value in flags.items() if value is not None}
    if not args.quantize:
        if options:
            args.usage_error("--q-bits, --q-group-size and --quant-predicate need -q (--quantize)")
        return None
    try:
        Quantization.of(options)
    except PrecisionError as error:
        args.usage_error(str(error))
    return options
