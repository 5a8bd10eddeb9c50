"""The settings of generation that the flags make, and text generation with them."""

from __future__ import annotations

import argparse
from typing import Any

from mlx_transmuter import api
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model, eos_token_ids
from mlx_transmuter.notices import print_notice
from mlx_transmuter.tasks import text


def text_generation(
    model: Model, args: argparse.Namespace, prompt_cache: PromptCache | None = None
) -> text.TextGeneration:
    """Text generation with the settings of the flags."""
    draft = None if args.draft_model is None else api.load(args.draft_model)
    if draft is None and args.num_draft_tokens is not None:
        print_notice("--num-draft-tokens has no effect without --draft-model")
    options = {"chat_template_vars": args.chat_template_config, "prompt_cache": prompt_cache, "assistant_model": draft}
    return text.generation(model, **options, **generation_settings(model, args))


def kv_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of --kv-bits and --kv-group-size."""
    return {"kv_bits": args.kv_bits, "kv_group_size": args.kv_group_size}


def generation_settings(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are set, by their names in generation_config.json."""
    sampling_flags = {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}
    settings: dict[str, Any] = {name: value for name, value in sampling_flags.items() if value is not None}
    if settings.get("temperature") == 0:
        if ignored_flags := [f"--{name.replace('_', '-')}" for name in settings if name != "temperature"]:
            verb = "has" if len(ignored_flags) == 1 else "have"
            print_notice(f"{', '.join(ignored_flags)} {verb} no effect with --temp 0, which is greedy")
        settings = {"do_sample": False}
    elif settings:
        settings["do_sample"] = True
    other_flags = {
        "max_new_tokens": args.max_tokens,
        "num_assistant_tokens": args.num_draft_tokens,
        "prompt_lookup_num_tokens": args.prompt_lookup,
        "prefill_step_size": args.prefill_step_size,
    }
    settings |= {name: value for name, value in other_flags.items() if value is not None}
    if args.kv_bits is not None:
        settings |= kv_settings(args)
    if args.extra_eos_token:
        extra = [_token_id(model, token) for token in args.extra_eos_token]
        settings["eos_token_id"] = [*eos_token_ids(model), *extra]
    return settings


def _token_id(model: Model, token: str) -> int:
    """The id of an --extra-eos-token: digits are an id, as in mlx_lm."""
    if token.isascii() and token.isdigit():
        return int(token)
    token_id = model.tokenizer.token_id(token) if model.tokenizer else None
    if token_id is None:
        raise GenerationError("--extra-eos-token", repr(token), "a token of the vocabulary, or an id")
    return token_id
