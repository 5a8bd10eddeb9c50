"""`mlx-transmuter generate`: one prompt, its text as it comes, and what it took."""

from __future__ import annotations

import argparse

from mlx_transmuter.cli.generation_settings import text_generation
from mlx_transmuter.cli.model_loading import load_model, open_prompt_cache
from mlx_transmuter.cli.prompts import as_chat, read_prompt
from mlx_transmuter.cli.terminal import print_text
from mlx_transmuter.notices import print_notice


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args)
    model = load_model(args)
    prompt_or_chat = as_chat(model, args, prompt)
    cache = open_prompt_cache(model, args)
    generation = text_generation(model, args, cache)
    pieces = generation.stream(prompt_or_chat, seed=args.seed)
    if args.verbose:
        print("=" * 10)
    last = None
    for last in pieces:
        print_text(last, end="")
    print()
    if last is not None and last.notice:
        print_notice(last.notice)
    if args.verbose and last is not None:
        print("=" * 10)
        print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens/s")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens/s ({last.finish_reason})")
        if last.draft_counts is not None:
            counts = last.draft_counts
            accepted = f"{counts.accepted} of {counts.proposed} accepted"
            print(f"Drafts: {accepted}, {counts.tokens_per_pass:.2f} tokens per pass")
        print(f"Compiled shapes: {generation.compilations}")
        print(
            f"Peak memory: {last.peak_memory:.3f} GB"
            if last.peak_memory >= 1
            else f"Peak memory: {last.peak_memory * 1e3:.1f} MB"
        )
    return 0
