"""The settings of generation that the flags make, and the task that has them."""

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
    more = {"chat_template_vars": args.chat_template_config, "prompt_cache": prompt_cache, "assistant_model": draft}
    return text.generation(model, **more, **generation_settings(model, args))


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
        given["eos_token_id"] = [*eos_token_ids(model), *extra]
    return given


def _token_id(model: Model, token: str) -> int:
    """The id of an --extra-eos-token: digits are an id, as in mlx_lm."""
    if token.isascii() and token.isdigit():
        return int(token)
    found = model.tokenizer.token_id(token) if model.tokenizer else None
    if found is None:
        raise GenerationError("--extra-eos-token", repr(token), "a token of the vocabulary, or an id")
    return found
