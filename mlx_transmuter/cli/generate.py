"""`mlx-transmuter generate`: one prompt, its text as it comes, and what it took."""

from __future__ import annotations

import argparse

from mlx_transmuter.cli.model import asked, load, prompt_cache, rendered, task


def run(args: argparse.Namespace) -> int:
    prompt = asked(args)
    model = load(args)
    said = rendered(model, args, prompt)
    cache = prompt_cache(model, args)
    generation = task(model, args, cache)
    pieces = generation.stream(said, seed=args.seed)
    if args.verbose:
        print("=" * 10)
    last = None
    for last in pieces:
        print(last, end="", flush=True)
    print()
    if args.verbose and last is not None:
        print("=" * 10)
        print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens/s")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens/s ({last.finish_reason})")
        if last.guesses is not None:
            proposed, kept, each = last.guesses.proposed, last.guesses.kept, last.guesses.tokens_per_pass
            print(f"Guesses: {kept} of {proposed} kept, {each:.2f} tokens per pass")
        print(f"Compiled shapes: {generation.compilations}")
        print(
            f"Peak memory: {last.peak_memory:.3f} GB"
            if last.peak_memory >= 1
            else f"Peak memory: {last.peak_memory * 1e3:.1f} MB"
        )
    return 0
