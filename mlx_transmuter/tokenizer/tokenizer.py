"""Text to token ids and back: a tokenizer.json with its chat templates, and text that streams in whole characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import AddedToken, processors
from tokenizers.decoders import DecodeStream

from mlx_transmuter.errors import TransmuterError

# What the files may be at most; the largest tokenizer.json of the hub (Gemma 3) has 33 MB, the largest template 30 KB.
MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_TEMPLATE_BYTES = 2**20

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The classes of transformers whose fast tokenizer replaces the post-processor of tokenizer.json by
# update_post_processor: what each adds before a text where tokenizer_config.json does not say.
_ADDS_BOS = {"Llama": True, "CodeLlama": True, "Gemma": True, "Cohere": True, "GPTNeoX": False}


class TokenizerError(TransmuterError):
    """A tokenizer or a chat template that cannot be used; `where` is its file."""

    def __init__(self, found: str, *, where: object = "", expected: str = "", do: str = ""):
        super().__init__(where, found, expected, do)


class Tokenizer:
    """A `tokenizers.Tokenizer` as transformers' PreTrainedTokenizerFast sets it up, less what cuts or pads a text.

    `special_tokens` maps names (bos_token, eos_token, pad_token, ...) to their text. `eos_token_ids` are the ids of all
    files that name one, joined: generation_config.json, tokenizer_config.json and genai_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        *,
        templates: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        self.backend = backend
        self.config = dict(config or {})
        self.special_tokens = {
            name: text for name in SPECIAL_TOKENS if (text := _token_text(self.config.get(name))) is not None
        }
        self._templates = dict(templates or {})
        self._compiled_templates: dict[str, Any] = {}
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, self.config, self.special_tokens)
        _set_prefix_space(backend, self.config)
        _set_post_processor(backend, self.config, self.special_tokens)
        named = self.token_id("eos_token")
        self.eos_token_ids = sorted({*eos_token_ids, *(() if named is None else (named,))})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a folder with tokenizer.json, or None where there is none.

        Also read, where present: tokenizer_config.json, special_tokens_map.json, generation_config.json,
        genai_config.json, chat_template.jinja, chat_template.json and additional_chat_templates/*.jinja. Raises
        TokenizerError for a file that is too large, malformed, or not what its name says.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        data = _read_limited(file, MAX_TOKENIZER_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:  # the library panics on some malformed files, outside Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise TokenizerError(
                first_line(error), where=file, expected="a tokenizer of the tokenizers library"
            ) from None
        config = {
            **_read_json_object(folder / "special_tokens_map.json"),
            **_read_json_object(folder / "tokenizer_config.json"),
        }
        genai = _read_json_object(folder / "genai_config.json").get("model")
        eos = [
            *_eos_ids(
                _read_json_object(folder / "generation_config.json").get("eos_token_id"),
                folder / "generation_config.json",
            ),
            *_eos_ids(genai.get("eos_token_id") if isinstance(genai, dict) else None, folder / "genai_config.json"),
        ]
        try:
            return cls(backend, config, templates=_read_templates(folder, config), eos_token_ids=eos)
        except TokenizerError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(first_line(error), where=folder / "tokenizer_config.json") from error

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def vocabulary(self) -> dict[str, int]:
        """Each token's text and its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def token_id(self, name: str) -> int | None:
        """The id of a special token by its name ("bos_token"), or of a token by its text; None where there is none."""
        return self.backend.token_to_id(self.special_tokens.get(name, name))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. One that starts with the bos token itself, as chat templates' do, gets no second one."""
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):
            raise TokenizerError(f"cannot encode {shorten(text)}", expected="a str of valid Unicode") from None
        bos = self.special_tokens.get("bos_token")
        if bos and add_special_tokens and text.startswith(bos) and ids[:2] == [self.token_id("bos_token")] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        try:
            return self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError, ValueError):
            raise TokenizerError(f"cannot decode {shorten(ids)}", expected="token ids from 0 to 4294967295") from None

    def stream(self) -> DetokenizerStream:
        """A new stream of text for the tokens of one sequence, special tokens skipped."""
        return DetokenizerStream(self)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_vars: Any,
    ) -> str:
        """The text that the chat template makes of messages (transformers' apply_chat_template, tokenize=False).

        `tools` are JSON schemas; with them a template named tool_use is taken where there is one, else the default.
        `template_vars` reach the template by name. Encode the text with add_special_tokens=False. The template runs in
        Jinja's immutable sandbox. Raises TokenizerError where there is no template or it refuses the messages.
        """
        wrong = next((m for m in messages if not isinstance(m, Mapping) or "role" not in m), None)
        if isinstance(messages, Mapping) or wrong is not None:
            raise TokenizerError(
                f"chat message {shorten(wrong)}", expected='dicts such as {"role": "user", "content": "Hi"}'
            )
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            there = f"only {', '.join(self._templates)}" if self._templates else "none"
            raise TokenizerError(f"the tokenizer has no chat template ({there})", do="give the prompt as plain text")
        variables: dict[str, Any] = {**self.special_tokens, "tools": tools, "documents": None, **template_vars}
        try:
            if name not in self._compiled_templates:
                self._compiled_templates[name] = _jinja_environment().from_string(self._templates[name])
            return self._compiled_templates[name].render(
                messages=messages, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise TokenizerError(f"the chat template failed: {first_line(error)}") from error


class DetokenizerStream:
    """The text of one sequence as its tokens come: what `push` returns is final, what `flush` returns is the rest.

    All pieces joined are `tokenizer.decode` of all ids. Half a character waits for its other half. A run of
    byte-fallback tokens (`<0xE4>`) waits for the token after it, because one bad byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special_ids = {id for id, token in added.items() if token.special}
        decoder = tokenizer.backend.decoder
        self._byte_fallback = decoder is not None and b'"ByteFallback"' in decoder.__getstate__()
        self._reset()

    def _reset(self) -> None:
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._pending_ids: list[int] = []
        self._sent_length = 0
        self._prefix_is_final = True

    def push(self, id: int) -> str:
        """The text that became final with this token; often "", when a character is not whole yet."""
        id = int(id)
        if id in self._special_ids:
            return ""
        self._ids.append(id)
        self._pending_ids.append(id)
        if not self._prefix_is_final or self._may_continue(id):
            return ""
        held, self._pending_ids = self._pending_ids, []
        try:
            text = self._decoder.step(self._tokenizer.backend, held) or ""
        except Exception:
            # This decoder changes earlier text as tokens come: nothing more is final before the end.
            self._prefix_is_final = False
            return ""
        self._sent_length += len(text)
        return text

    def flush(self) -> str:
        """The text still held back, at the end of the sequence. The stream then stands at the start of a new one."""
        rest = self._tokenizer.decode(self._ids)[self._sent_length :]
        self._reset()
        return rest

    def _may_continue(self, id: int) -> bool:
        token = self._tokenizer.backend.id_to_token(id)
        if token is None:
            return True
        return self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _jinja_environment():
    """The Jinja environment of transformers' chat_template_utils: its sandbox, filters and `{% generation %}` block."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Adds what tokenizer_config.json names and tokenizer.json lacks, as PreTrainedTokenizerFast.__init__ does."""
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    for _, entry in listed:
        flags = {flag: entry[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in entry}
        token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
        if token.content not in have:
            token.special = token.special or token.content in special.values()
            backend.add_tokens([token])
            have.add(token.content)
    backend.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(special.values()) if text not in have])


def _set_prefix_space(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """The tokenizer_config's add_prefix_space (default False) overrides a pre-tokenizer's own, as in transformers."""
    pre, wanted = backend.pre_tokenizer, bool(config.get("add_prefix_space", False))
    if getattr(pre, "add_prefix_space", wanted) != wanted:
        pre.add_prefix_space = wanted
        backend.pre_tokenizer = pre


def _set_post_processor(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """For the classes that do it in transformers: bos and eos around a text as add_bos_token, add_eos_token say."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    if name not in _ADDS_BOS:
        return
    bos = special.get("bos_token") if config.get("add_bos_token", _ADDS_BOS[name]) else None
    eos = special.get("eos_token") if config.get("add_eos_token", False) else None
    around = [(text, backend.token_to_id(text)) for text in (bos, eos) if text]
    single = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
    backend.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=around)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files win over the text inside tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    inside = _read_json_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, dict):
        templates.update({str(name): str(text) for name, text in inside.items()})
    elif isinstance(inside, list):
        try:
            templates.update({str(entry["name"]): str(entry["template"]) for entry in inside})
        except (TypeError, KeyError):
            raise TokenizerError(
                "chat_template is a list of something else",
                where=folder / "tokenizer_config.json",
                expected='a text, or a list of {"name": ..., "template": ...}',
            ) from None
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    for name, file in files.items():
        if file.is_file():
            templates[name] = _decode_utf8(_read_limited(file, MAX_TEMPLATE_BYTES), file)
    return templates


def _read_limited(file: Path, limit: int) -> bytes:
    size = file.stat().st_size
    if size > limit:
        raise TokenizerError(f"{size:,} bytes", where=file, expected=f"at most {limit:,}")
    return file.read_bytes()


def _decode_utf8(data: bytes, file: Path) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(str(error), where=file, expected="UTF-8") from None


def _read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_decode_utf8(_read_limited(file, MAX_JSON_BYTES), file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(first_line(error), where=file, expected="JSON") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"JSON {type(value).__name__}", where=file, expected="an object")
    return value


def _eos_ids(value: Any, file: Path) -> list[int]:
    """eos_token_id of a configuration as a list: None, one id or several."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise TokenizerError(f"eos_token_id {shorten(value)}", where=file, expected="a token id or a list of them")
    return ids


def _token_text(entry: Any) -> str | None:
    """The text of a special token as the files write it: a string, or an object with `content`."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) and text else None


def shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
