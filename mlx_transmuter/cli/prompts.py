"""The prompt of a command: from a flag, a file or stdin, as it is or as a chat."""

from __future__ import annotations

import argparse
import sys

from mlx_transmuter.cli.model_loading import model_label
from mlx_transmuter.generation import GenerationError
from mlx_transmuter.model import Model
from mlx_transmuter.notices import print_notice

DEMO_PROMPT = "Tell me a story about a fox."


def read_prompt(args: argparse.Namespace) -> str:
    """The text of --prompt and its like. Ends with a usage error where there is none."""
    text = args.prompt if args.prompt is not None else args.prompt_file
    if text is None and args.model is not None:
        args.usage_error("no prompt: give --prompt TEXT, --prompt - or --prompt-file FILE")
    if args.prompt == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            args.usage_error(f"the prompt on stdin is no UTF-8: {error}")
    return DEMO_PROMPT if text is None else text


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


def system_messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
