"""`mlx-transmuter chat`: a conversation whose messages, and their keys and values, stay for the next turn."""

from __future__ import annotations

import argparse
import contextlib
import re
import select
import sys

from mlx_transmuter.cli.generation_settings import kv_settings, text_generation
from mlx_transmuter.cli.model_loading import load_model, model_label, open_prompt_cache
from mlx_transmuter.cli.prompts import system_messages
from mlx_transmuter.cli.terminal import print_text
from mlx_transmuter.errors import question_of_closest, shorten
from mlx_transmuter.generation import GenerationError, PromptCache
from mlx_transmuter.model import Model
from mlx_transmuter.notices import print_notice, print_notice_once
from mlx_transmuter.tasks.text import TextGeneration
from mlx_transmuter.tokenizer import TokenizerError

COMMANDS = {"/help": "lists the commands", "/reset": "begins anew", "/exit": "leaves"}
KEYS = "Ctrl-C stops an answer, Ctrl-D leaves"
# The pieces of a pasted block come faster than anybody types.
SECONDS_BETWEEN_PASTED_LINES = 0.02


def run(args: argparse.Namespace) -> int:
    _prepare_line_editing()
    model = load_model(args)
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise GenerationError(model_label(args), "no chat template", "a model made for chats", "use generate instead")
    generation = text_generation(model, args, open_prompt_cache(model, args) or _new_prompt_cache(model, args))
    print_notice(_help_text())
    conversation, printed_notices = system_messages(args), set[str]()
    while True:
        try:
            turn = _read_turn()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if turn.strip() == "/exit":
            return 0
        if turn.strip() == "/reset":
            conversation = system_messages(args)
        elif _is_command(turn):
            print_notice(_reply_to_command(turn.strip()))
        elif turn.strip():
            try:
                messages = [*conversation, {"role": "user", "content": turn}]
                answer = _print_answer(generation, messages, args.seed, printed_notices)
            except (GenerationError, TokenizerError) as error:  # such as a conversation that grew too long
                print_notice(f"{error} (/reset begins anew)")
                continue
            conversation += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]


def _new_prompt_cache(model: Model, args: argparse.Namespace) -> PromptCache | None:
    with contextlib.suppress(GenerationError):  # a model without one computes each turn from its beginning
        return PromptCache(model, **kv_settings(args))
    return None


def _prepare_line_editing() -> None:
    with contextlib.suppress(ImportError):
        import readline  # input() then has history and editing

        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted block is one line, with its line breaks


def _is_command(turn: str) -> bool:
    """Whether the turn is one line whose first word is a slash and letters; a path has more, such as /usr/bin."""
    return re.fullmatch(r"/[A-Za-z]+([ \t].*)?", turn.rstrip()) is not None


def _help_text() -> str:
    return ", ".join(f"{command} {effect}" for command, effect in COMMANDS.items()) + f", {KEYS}"


def _reply_to_command(text: str) -> str:
    if text == "/help":
        return _help_text()
    commands = f"the commands: {_help_text()}; with a space before it, it goes to the model"
    return f"no command {shorten(text)}.{question_of_closest(text.split()[0], list(COMMANDS))} {commands}"


def _read_turn() -> str:
    """Returns the lines of one turn: a line, or in a terminal a pasted block, whose lines arrive at once.

    A command is a turn of its own. Into a pipe no prompt is written; from a pipe each line is a turn.
    """
    in_terminal = sys.stdin.isatty()
    lines = [input("> " if in_terminal and sys.stdout.isatty() else "")]
    with contextlib.suppress(EOFError):
        while in_terminal and not _is_command(lines[0]) and _has_input():
            lines.append(input(""))
    return "\n".join(lines).rstrip("\n")


def _has_input() -> bool:
    return bool(select.select([sys.stdin], [], [], SECONDS_BETWEEN_PASTED_LINES)[0])


def _print_answer(
    generation: TextGeneration, messages: list[dict[str, str]], seed: int | None, printed_notices: set[str]
) -> str:
    """Prints the answer as it comes, and returns the text; Ctrl-C ends it. Its notice follows, once a chat."""
    answer, notice = "", None
    pieces = generation.stream(messages, seed=seed)
    try:
        for piece in pieces:
            print_text(piece, end="")
            answer += piece
            notice = piece.notice
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()
    print()
    sys.stdout.flush()
    print_notice_once(notice, printed_notices)
    return answer
