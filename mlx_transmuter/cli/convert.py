"""`mlx-transmuter convert`: a source into a folder."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_transmuter import api
from mlx_transmuter.precision_options import PrecisionError, Quantization


def run(args: argparse.Namespace) -> int:
    out = api.convert(
        args.model,
        args.out,
        file=args.file,
        dtype=args.dtype,
        revision=args.revision,
        quantize=_quantization_spec(args),
        float_activations=args.float_activations,
    )
    print(out)
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
