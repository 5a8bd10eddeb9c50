"""The tokenizer of a folder, set up as transformers' PreTrainedTokenizerFast sets it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from mlx_transmuter.errors import first_line, shorten
from mlx_transmuter.tokenizer.chat_template import ChatTemplates, read_templates
from mlx_transmuter.tokenizer.detokenizer_stream import DetokenizerStream
from mlx_transmuter.tokenizer.errors import TokenizerError
from mlx_transmuter.tokenizer.files import MAX_TOKENIZER_BYTES, read_json_object, read_limited

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The classes of transformers whose fast tokenizer replaces the post-processor of tokenizer.json by
# update_post_processor: what each adds before a text where tokenizer_config.json does not say.
_ADDS_BOS = {"Llama": True, "CodeLlama": True, "Gemma": True, "Cohere": True, "GPTNeoX": False}


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
        self._chat_templates = ChatTemplates(templates or {}, self.special_tokens)
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
        data = read_limited(file, MAX_TOKENIZER_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:  # the library panics on some malformed files, outside Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise TokenizerError(
                first_line(error), where=file, expected="a tokenizer of the tokenizers library"
            ) from None
        config = {
            **read_json_object(folder / "special_tokens_map.json"),
            **read_json_object(folder / "tokenizer_config.json"),
        }
        genai = read_json_object(folder / "genai_config.json").get("model")
        eos = [
            *_eos_ids(
                read_json_object(folder / "generation_config.json").get("eos_token_id"),
                folder / "generation_config.json",
            ),
            *_eos_ids(genai.get("eos_token_id") if isinstance(genai, dict) else None, folder / "genai_config.json"),
        ]
        try:
            return cls(backend, config, templates=read_templates(folder, config), eos_token_ids=eos)
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
            raise TokenizerError(f"text {shorten(text)}", expected="a str of valid Unicode") from None
        bos = self.special_tokens.get("bos_token")
        if bos and add_special_tokens and text.startswith(bos) and ids[:2] == [self.token_id("bos_token")] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        try:
            return self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError, ValueError):
            raise TokenizerError(f"token ids {shorten(ids)}", expected="integers from 0 to 4294967295") from None

    def stream(self) -> DetokenizerStream:
        """A new stream of text for the tokens of one sequence, special tokens skipped."""
        return DetokenizerStream(self)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

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
        return self._chat_templates.render(messages, add_generation_prompt, tools, template_vars)


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


def _eos_ids(value: Any, file: Path) -> list[int]:
    """eos_token_id of a configuration as a list: None, one id or several."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise TokenizerError(f"eos_token_id {shorten(value)}", where=file, expected="a token id or a list of them")
    return ids


def _token_text(entry: Any) -> str | None:
    """The text of a special token as the files write it: a string, or an object with `content`."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) and text else None
