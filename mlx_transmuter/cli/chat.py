"""`mlx-transmuter chat`: a conversation whose messages, and their keys and values, stay for the next turn."""

from __future__ import annotations

import argparse
import contextlib
import sys

from mlx_transmuter.cli.generation_settings import kv_settings, text_generation
from mlx_transmuter.cli.model_loading import load_model, load_prompt_cache, model_label
from mlx_transmuter.cli.prompts import system_messages
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.notices import print_notice
from mlx_transmuter.tokenizer import TokenizerError


def run(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 input() then has history and editing
    model = load_model(args)
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise GenerationError(model_label(args), "no chat template", "a model made for chats", "use generate instead")
    cache = load_prompt_cache(model, args)
    if cache is None:
        with contextlib.suppress(GenerationError):  # a model without one computes each turn from its beginning
            cache = PromptCache(model, **kv_settings(args))
    generation = text_generation(model, args, cache)
    print_notice("/reset begins anew, Ctrl-C stops an answer, /exit or Ctrl-D leaves")
    conversation = system_messages(args)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            conversation = system_messages(args)
        elif line.strip():
            try:
                answer = _print_answer(generation, [*conversation, {"role": "user", "content": line}], args.seed)
            except (GenerationError, TokenizerError) as error:  # such as a conversation that grew too long
                print_notice(f"{error} (/reset begins anew)")
                continue
            conversation += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def _print_answer(generation, messages: list[dict[str, str]], seed: int | None) -> str:
    """Prints the answer as it comes, and returns what was printed; Ctrl-C ends it."""
    answer = ""
    pieces = generation.stream(messages, seed=seed)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()
    print()
    sys.stdout.flush()
    return answer
