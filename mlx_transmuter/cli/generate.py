"""`mlx-transmuter generate`: one prompt, its text as it comes, and what it took."""

from __future__ import annotations

import argparse
import sys

from mlx_transmuter.cli.model import label, load, messages, note, task
from mlx_transmuter.generation import GenerationError

DEMO_PROMPT = "Tell me a story about a fox."


def run(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    model = load(args)
    if model.tokenizer is None:
        raise GenerationError(
            label(args), "no tokenizer.json", "one beside the model", "use the Python API, which takes ids"
        )
    generation = task(model, args)
    chat = model.tokenizer.has_chat_template and not args.ignore_chat_template
    if args.system_prompt and not chat:
        note("--system-prompt has no effect without a chat template")
    pieces = generation.stream(
        [*messages(args), {"role": "user", "content": prompt}] if chat else prompt, seed=args.seed
    )
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


def _prompt(args: argparse.Namespace) -> str:
    given = args.prompt if args.prompt is not None else args.prompt_file
    if given is None and args.model is not None:
        args.usage_error("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
    if args.prompt == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            args.usage_error(f"the prompt on stdin is no UTF-8: {error}")
    return DEMO_PROMPT if given is None else given
