"""What the commands load: the model of --model, and the prompt cache of --prompt-cache-file."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_transmuter import api
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.notices import print_notice

DEMO_FOLDER = Path(__file__).parent.parent / "demo"


def load_model(args: argparse.Namespace) -> Model:
    """The model of --model, or the demo model of the package with a notice."""
    if args.model is None:
        print_notice("no --model: taking the demo model that comes with the package")
    source = DEMO_FOLDER if args.model is None else args.model
    return api.load(source, file=args.file, dtype=args.dtype, revision=args.revision)


def model_label(args: argparse.Namespace) -> str:
    """What to call the model in an error."""
    return args.model or "the demo model"


def open_prompt_cache(model: Model, args: argparse.Namespace) -> PromptCache | None:
    """The cache of --prompt-cache-file, whose bits then go for --kv-bits where that isn't given; None without the
    flag."""
    if args.prompt_cache_file is None:
        return None
    cache = PromptCache.load(args.prompt_cache_file, model)
    file_format = (cache.kv_bits, cache.kv_group_size)
    if args.kv_bits is None:
        args.kv_bits, args.kv_group_size = file_format
    elif file_format != (args.kv_bits, args.kv_group_size):
        found = (
            "keys and values without quantization"
            if cache.kv_bits is None
            else f"{cache.kv_bits} bits in groups of {cache.kv_group_size}"
        )
        expected = f"{args.kv_bits} bits in groups of {args.kv_group_size}, as the flags say"
        raise GenerationError(args.prompt_cache_file, found, expected, "leave out --kv-bits, or make the file anew")
    return cache
