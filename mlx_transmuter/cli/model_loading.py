"""What generate, chat and inspect share: the model that was asked for, and the settings that the flags make."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mlx_transmuter import api
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.notices import print_notice
from mlx_transmuter.tasks import text

DEMO_FOLDER = Path(__file__).parent.parent / "demo"
DEMO_PROMPT = "Tell me a story about a fox."


def load_model(args: argparse.Namespace) -> Model:
    """The model of --model, or the demo model of the package, which is said."""
    if args.model is None:
        print_notice("no --model: taking the demo model that comes with the package")
    return api.load(args.model or DEMO_FOLDER, file=args.file, dtype=args.dtype, revision=args.revision)


def model_label(args: argparse.Namespace) -> str:
    """What to call the model in an error."""
    return args.model or "the demo model"


def text_generation(
    model: Model, args: argparse.Namespace, prompt_cache: PromptCache | None = None
) -> text.TextGeneration:
    """Text generation with the settings of the flags."""
    draft = None if args.draft_model is None else api.load(args.draft_model)
    if draft is None and args.num_draft_tokens is not None:
        print_notice("--num-draft-tokens has no effect without --draft-model")
    more = {"chat_template_vars": args.chat_template_config, "prompt_cache": prompt_cache, "assistant_model": draft}
    return text.generation(model, **more, **generation_settings(model, args))


def read_prompt(args: argparse.Namespace) -> str:
    """The text of --prompt and its like. Ends with a usage error where there is none."""
    given = args.prompt if args.prompt is not None else args.prompt_file
    if given is None and args.model is not None:
        args.usage_error("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
    if args.prompt == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            args.usage_error(f"the prompt on stdin is no UTF-8: {error}")
    return DEMO_PROMPT if given is None else given


def as_chat(model: Model, args: argparse.Namespace, prompt: str) -> str | list[dict[str, str]]:
    """The prompt as the messages of a chat where the model has a template for them, else as it is."""
    if model.tokenizer is None:
        raise GenerationError(
            model_label(args), "no tokenizer.json", "one beside the model", "use the Python API, which takes ids"
        )
    if model.tokenizer.has_chat_template and not args.ignore_chat_template:
        return [*system_messages(args), {"role": "user", "content": prompt}]
    if args.system_prompt:
        print_notice("--system-prompt has no effect without a chat template")
    return prompt


def load_prompt_cache(model: Model, args: argparse.Namespace) -> PromptCache | None:
    """The cache of --prompt-cache-file, whose bits then go for --kv-bits where that isn't given; None without the
    flag."""
    if args.prompt_cache_file is None:
        return None
    cache = PromptCache.load(args.prompt_cache_file, model)
    held = (cache.kv_bits, cache.kv_group_size)
    if args.kv_bits is None:
        args.kv_bits, args.kv_group_size = held
    elif held != (args.kv_bits, args.kv_group_size):
        found = "keys and values as they are" if held[0] is None else f"{held[0]} bits in groups of {held[1]}"
        wanted = f"{args.kv_bits} bits in groups of {args.kv_group_size}, as the flags say"
        raise GenerationError(args.prompt_cache_file, found, wanted, "leave out --kv-bits, or make the file anew")
    return cache


def kv_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What --kv-bits and --kv-group-size ask for."""
    return {"kv_bits": args.kv_bits, "kv_group_size": args.kv_group_size}


def generation_settings(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Names of generation_config.json from the flags: those given, and no others."""
    chosen = {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if given.get("temperature") == 0:
        if unread := [f"--{name.replace('_', '-')}" for name in given if name != "temperature"]:
            print_notice(
                f"{', '.join(unread)} {'has' if len(unread) == 1 else 'have'} no effect with --temp 0, which is greedy"
            )
        given = {"do_sample": False}
    elif given:
        given["do_sample"] = True
    named = {
        "max_new_tokens": args.max_tokens,
        "num_assistant_tokens": args.num_draft_tokens,
        "prompt_lookup_num_tokens": args.prompt_lookup,
        "prefill_step_size": args.prefill_step_size,
    }
    given |= {name: value for name, value in named.items() if value is not None}
    if args.kv_bits is not None:
        given |= kv_settings(args)
    if args.extra_eos_token:
        extra = [_token_id(model, token) for token in args.extra_eos_token]
        given["eos_token_id"] = [*text.eos_token_ids(model), *extra]
    return given


def system_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []


def _token_id(model: Model, token: str) -> int:
    """The id of an --extra-eos-token: digits are an id, as in mlx_lm."""
    if token.isascii() and token.isdigit():
        return int(token)
    found = model.tokenizer.token_id(token) if model.tokenizer else None
    if found is None:
        raise GenerationError("--extra-eos-token", repr(token), "a token of the vocabulary, or an id")
    return found
