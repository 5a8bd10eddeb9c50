"""`mlx-transmuter cache-prompt`: runs a prompt and writes what was computed to a file, for --prompt-cache-file."""

from __future__ import annotations

import argparse

from mlx_transmuter.cli.model import asked, load, note, packing, rendered
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.tasks import text


def run(args: argparse.Namespace) -> int:
    prompt = asked(args)
    model = load(args)
    said = rendered(model, args, prompt)
    cache = PromptCache(model, **packing(args))
    once = {**packing(args), "max_new_tokens": 1, "num_beams": 1, "num_return_sequences": 1, "do_sample": False}
    text.generation(model, chat_template_vars=args.chat_template_config, prompt_cache=cache, **once)(said)
    cache.save(args.prompt_cache_file)
    size = cache.tokens * cache.store.slot_bytes
    said_size = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    note(f"{cache.tokens} tokens in {args.prompt_cache_file}, of {said_size}")
    return 0
