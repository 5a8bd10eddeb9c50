"""The commands' arguments. Nothing heavy is imported before a command runs, so that --help is quick."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from mlx_transmuter import __version__
from mlx_transmuter.errors import printable_text, question_of_closest

DESCRIPTION = "Run ONNX decoders on Apple silicon through MLX."
SAMPLING_EPILOG = """\
The temperature comes before top-k, top-p and min-p, as in transformers; mlx_lm applies it last, so the same flags keep
other tokens there. What no flag says, the model's generation_config.json does."""
PROMPT_CACHE_EPILOG = """\
generate and chat take the file as --prompt-cache-file. The prompt is still given whole; what comes after the longest
beginning of it that is in the file is computed. A file of a system prompt alone saves its computation in each run."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and name the flag that an unknown one is most like."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] its overloads differ by Python's version
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        args = sys.argv[1:] if args is None else list(args)
        for arg in args:
            if arg == "--" or (self._subparsers and not arg.startswith("-")):  # what follows a command is its own
                break
            flag = arg.split("=")[0]
            if flag.startswith("--") and " " not in arg and flag not in self._option_string_actions:
                self._refuse_arguments([arg])  # first, for a required one that is misspelt would be called missing
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse_arguments(unknown)
        return namespace, unknown

    def _refuse_arguments(self, arguments: list[str]) -> NoReturn:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        question = question_of_closest(arguments[0].split("=")[0], flags) if arguments[0].startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(arguments)}.{question}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable_text(message)} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; the arguments' `import_command` gives what runs them: its exit code."""
    parser = CommandParser("mlx-transmuter", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, summary: str, epilog: str | None = None) -> CommandParser:
        added = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog, allow_abbrev=False
        )
        added.set_defaults(
            import_command=lambda: import_module(f"mlx_transmuter.cli.{name.replace('-', '_')}").run,
            usage_error=added.error,
        )
        return added

    generate = command(
        "generate", "continue a prompt, or answer it where the model has a chat template", SAMPLING_EPILOG
    )
    _add_model_arguments(generate)
    _add_prompt_arguments(generate)
    _add_generation_arguments(generate)
    generate.add_argument(
        "--verbose", nargs="?", type=_parse_bool, const=True, default=True, metavar="True|False",
        help="also print speeds, compiled shapes and memory (default: True)",
    )  # fmt: skip

    chat = command("chat", "hold a conversation (/help lists its commands)", SAMPLING_EPILOG)
    _add_model_arguments(chat)
    _add_generation_arguments(chat)

    cached = command("cache-prompt", "run a prompt once, for prompts that begin with it", PROMPT_CACHE_EPILOG)
    _add_model_arguments(cached)
    _add_prompt_arguments(cached)
    _add_chat_arguments(cached)
    _add_kv_arguments(cached)
    cached.add_argument(
        "--prompt-cache-file", required=True, type=_parse_name, metavar="FILE", help="the safetensors file to write"
    )

    convert = command("convert", "convert an ONNX decoder into a folder that loads without onnx")
    convert.add_argument(
        "--hf-path", "--model", required=True, dest="model", type=_parse_name, metavar="SOURCE",
        help="repository id, folder with ONNX files, or ONNX file",
    )  # fmt: skip
    convert.add_argument(
        "--mlx-path", "--out", "-o", dest="out", default="mlx_model", type=_parse_name, metavar="FOLDER",
        help="where the converted folder goes (default: mlx_model)",
    )  # fmt: skip
    _add_file_arguments(convert)
    convert.add_argument(
        "--quantize", "-q", action="store_true", help="quantize linear layers and embeddings of a float model"
    )
    convert.add_argument("--q-bits", type=int, metavar="BITS", help="bits of a weight: 2, 3, 4, 5, 6 or 8 (default: 4)")
    convert.add_argument(
        "--q-group-size", type=int, metavar="N", help="weights that share a scale: 32, 64 or 128 (default: 64)"
    )
    convert.add_argument(
        "--quant-predicate", metavar="RECIPE",
        help="more bits for the layers that need them: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6",
    )  # fmt: skip

    convert.add_argument(
        "--float-activations", action="store_true",
        help="an 8-bit file (dynamic or QDQ) keeps its activations in float: faster, with other rounding errors",
    )  # fmt: skip
    convert.add_argument(
        "--max-memory", type=_parse_memory, metavar="SIZE",
        help="memory that the conversion may take, as 6GB (default: three quarters of what there is); a larger model "
        "is proved with its weights read at each use, which takes longer",
    )  # fmt: skip

    inspect = command("inspect", "print a model's cache mode, inputs, operators, size and rewrites")
    inspect.add_argument("source", nargs="?", type=_parse_name, metavar="SOURCE", help="the same as --model")
    _add_model_arguments(inspect)
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=_parse_name, metavar="SOURCE",
        help="converted folder, repository id, folder with ONNX files, or ONNX file (default: the small demo model)",
    )  # fmt: skip
    _add_file_arguments(parser)


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=_parse_name, metavar="NAME", help="the ONNX file inside the source, such as onnx/model_q4.onnx"
    )
    parser.add_argument(
        "--dtype", type=_parse_dtype, metavar="DTYPE",
        help="pick the file by its dtype: fp32 fp16 q4 q4f16 q8 int8 uint8 bnb4 (default: the most precise); "
        "or convert to a float type: float16 bfloat16 float32",
    )  # fmt: skip
    parser.add_argument("--revision", type=_parse_name, metavar="NAME", help="branch, tag or commit of the repository")


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", "-p", metavar="TEXT", help='the prompt; "-" reads it from stdin')
    prompt.add_argument("--prompt-file", metavar="FILE", type=_read_text_file, help="the prompt, from a UTF-8 file")
    parser.add_argument("--ignore-chat-template", action="store_true", help="give the prompt to the model as it is")


def _add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-bits", type=int, choices=(4, 8), metavar="4|8", help="keep keys and values in so many bits an element")
    add(
        "--kv-group-size", type=int, choices=(32, 64, 128), default=64, metavar="32|64|128",
        help="elements that share a scale there (default: 64)",
    )  # fmt: skip


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--system-prompt", metavar="TEXT", help="a system message before the prompt")
    add(
        "--chat-template-config",
        type=_parse_json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template",
    )


def _add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_chat_arguments(parser)
    add(
        "--prefill-step-size", type=_number_in_range(int, 1), metavar="N",
        help="most tokens of the prompt in one step (default: 2048, on a CPU 128)",
    )  # fmt: skip
    add(
        "--prompt-cache-file",
        type=_parse_name,
        metavar="FILE",
        help="what cache-prompt computed; the prompt begins with its tokens",
    )
    _add_kv_arguments(parser)
    add(
        "--max-tokens",
        "-m",
        type=_number_in_range(int, 1),
        metavar="N",
        help="most tokens to generate (default: as the model says, else 256)",
    )
    add(
        "--temp",
        "--temperature",
        type=_number_in_range(float, 0),
        metavar="T",
        help="temperature of sampling; 0 is greedy",
    )
    add(
        "--top-p",
        type=_number_in_range(float, 0, 1),
        metavar="P",
        help="sample among the fewest tokens with this total probability",
    )
    add("--top-k", type=_number_in_range(int, 0), metavar="K", help="sample among the best K tokens; 0 is all")
    add(
        "--min-p",
        type=_number_in_range(float, 0, 1),
        metavar="P",
        help="drop tokens below this fraction of the top probability",
    )
    add("--seed", type=_number_in_range(int, 0), metavar="N", help="seed of sampling (default: random)")
    add(
        "--draft-model",
        type=_parse_name,
        metavar="SOURCE",
        help="a smaller model of the same tokenizer that drafts tokens; output unchanged",
    )
    add("--num-draft-tokens", type=_number_in_range(int, 1), metavar="N", help="most draft tokens at once")
    add(
        "--prompt-lookup",
        type=_number_in_range(int, 1),
        metavar="N",
        help="draft up to N tokens from the text so far; output unchanged",
    )
    add("--extra-eos-token", nargs="+", default=[], metavar="TOKEN", help="more tokens, or ids, that end the text")


def _number_in_range(kind: type, low: float, high: float = float("inf")) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text} is not {f'from {low} to {high}' if high < 1e9 else f'{low} or more'}"
            )
        return value

    number.__name__ = kind.__name__  # argparse says "invalid int value" with it
    return number


def _parse_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty, as that of a shell variable that is not set")
    return text


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return text.lower() in ("true", "1", "yes")


def _parse_json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"enable_thinking": false}}')
    return value


def _read_text_file(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None


def _parse_dtype(text: str) -> str:
    from mlx_transmuter.precision_options import FLOAT_DTYPES
    from mlx_transmuter.sources import FILE_DTYPES

    if text not in (*FILE_DTYPES, *FLOAT_DTYPES):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {' '.join((*FILE_DTYPES, *FLOAT_DTYPES))}")
    return text


def _parse_memory(text: str) -> int:
    from mlx_transmuter.memory import MemorySizeError, parse_memory_size

    try:
        return parse_memory_size(text)
    except MemorySizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
