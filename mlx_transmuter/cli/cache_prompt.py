"""`mlx-transmuter cache-prompt`: runs a prompt and writes what was computed to a file, for --prompt-cache-file."""

from __future__ import annotations

import argparse

from mlx_transmuter.cli.generation_settings import kv_settings
from mlx_transmuter.cli.model_loading import load_model
from mlx_transmuter.cli.prompts import as_chat, read_prompt
from mlx_transmuter.generation import PromptCache
from mlx_transmuter.notices import print_notice
from mlx_transmuter.tasks import text


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    model = load_model(args)
    prompt_or_chat = as_chat(model, args, prompt)
    cache = PromptCache(model, **kv_settings(args))
    settings = {**kv_settings(args), "max_new_tokens": 1, "num_beams": 1, "num_return_sequences": 1, "do_sample": False}
    text.generation(model, chat_template_vars=args.chat_template_config, prompt_cache=cache, **settings)(prompt_or_chat)
    cache.save(args.prompt_cache_file)
    size = cache.tokens * cache.kv_cache.slot_nbytes
    size_text = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    print_notice(f"{cache.tokens} tokens in {args.prompt_cache_file}, of {size_text}")
    return 0
