"""The tokenizer of a folder, set up as transformers' PreTrainedTokenizerFast sets it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from mlx_transmuter.errors import shorten
from mlx_transmuter.limited_files import MAX_TOKENIZER_BYTES, read_json_object, read_limited
from mlx_transmuter.path_arguments import as_path
from mlx_transmuter.tokenizer.chat_template import ChatTemplates, read_templates
from mlx_transmuter.tokenizer.components import normalizer_growth, set_byte_level_decoder
from mlx_transmuter.tokenizer.detokenizer_stream import DetokenizerStream
from mlx_transmuter.tokenizer.errors import TokenizerError, library_errors
from mlx_transmuter.tokenizer.tokenization_spaces import clean_up_spaces

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The classes of transformers whose fast tokenizer replaces the post-processor of tokenizer.json by
# update_post_processor: what each adds before a text where tokenizer_config.json does not say.
_ADDS_BOS = {"Llama": True, "CodeLlama": True, "Gemma": True, "Cohere": True, "GPTNeoX": False}

# What a normalizer may make of one text, in characters; the library takes about 20 bytes for each.
MAX_NORMALIZED_CHARACTERS = 2**28


class Tokenizer:
    """A `tokenizers.Tokenizer` as transformers' PreTrainedTokenizerFast sets it up, less what cuts or pads a text.

    Differs from transformers in one more way: byte-level tokens are decoded to their bytes whatever decoder the file
    names, where transformers prints "HiĠÃ©" for "Hi é".

    `special_tokens` maps names (bos_token, eos_token, pad_token, ...) to their text. `eos_token_ids` are the ids of all
    files that name one, joined: generation_config.json, tokenizer_config.json and genai_config.json.
    `clean_up_tokenization_spaces` is the tokenizer_config's, False where it is absent.
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
        self.clean_up_tokenization_spaces = bool(self.config.get("clean_up_tokenization_spaces", False))
        self._chat_templates = ChatTemplates(templates or {}, self.special_tokens)
        self._normalizer_growth = normalizer_growth(backend)
        backend.no_truncation()
        backend.no_padding()
        _add_tokens(backend, self.config, self.special_tokens)
        _set_prefix_space(backend, self.config)
        _set_post_processor(backend, self.config, self.special_tokens)
        set_byte_level_decoder(backend)
        named = self.token_id("eos_token")
        self.eos_token_ids = sorted({*eos_token_ids, *(() if named is None else (named,))})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a folder with tokenizer.json, or None where there is none.

        Also read, where present: tokenizer_config.json, special_tokens_map.json, generation_config.json,
        genai_config.json, chat_template.jinja, chat_template.json and additional_chat_templates/*.jinja. Raises
        TokenizerError for a file that is too large, malformed, or not what its name says.
        """
        folder = as_path(folder, "folder", TokenizerError, "a folder")
        file = folder / "tokenizer.json"
        if not file.exists():
            return None
        data = read_limited(file, MAX_TOKENIZER_BYTES, TokenizerError)
        with library_errors(where=file, expected="a tokenizer of the tokenizers library"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        config = {
            **read_json_object(folder / "special_tokens_map.json", TokenizerError),
            **read_json_object(folder / "tokenizer_config.json", TokenizerError),
        }
        genai = read_json_object(folder / "genai_config.json", TokenizerError).get("model")
        eos = [
            *_eos_ids(
                read_json_object(folder / "generation_config.json", TokenizerError).get("eos_token_id"),
                folder / "generation_config.json",
            ),
            *_eos_ids(genai.get("eos_token_id") if isinstance(genai, dict) else None, folder / "genai_config.json"),
        ]
        templates = read_templates(folder, config)
        with library_errors(where=folder / "tokenizer_config.json"):
            return cls(backend, config, templates=templates, eos_token_ids=eos)

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
        """The ids of a text, with those that the post-processor adds before and after it.

        A text that begins with the bos token itself gets a second one, as in transformers: encode what a chat template
        renders with add_special_tokens=False. Raises TokenizerError for text that is no valid Unicode, that the
        normalizer may make longer than 2**28 characters, or on which the library fails. The time of one call has no
        bound of its own (Rust code cannot be interrupted), but the regular expressions of the library give up.
        """
        if isinstance(text, str) and len(text) * self._normalizer_growth > MAX_NORMALIZED_CHARACTERS:
            raise TokenizerError(
                f"{len(text):,} characters, and a normalizer that makes up to {self._normalizer_growth:,} of each",
                expected=f"at most {MAX_NORMALIZED_CHARACTERS:,} characters after it",
            )
        with library_errors("a text on which the tokenizer fails: "):
            try:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            except (TypeError, UnicodeEncodeError):
                raise TokenizerError(f"text {shorten(text)}", expected="a str of valid Unicode") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        Loses the spaces before punctuation where `clean_up_tokenization_spaces` is set, special tokens or not, as in
        transformers. Raises TokenizerError for ids that cannot be, and where the library fails.
        """
        with library_errors("token ids on which the decoder fails: "):
            try:
                text = self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
            except (OverflowError, TypeError, ValueError):
                raise TokenizerError(f"token ids {shorten(ids)}", expected="integers from 0 to 4294967295") from None
        return clean_up_spaces(text) if self.clean_up_tokenization_spaces else text

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
        Jinja's immutable sandbox, with bounds on its time and on the text it makes (template_environment.py). Raises
        TokenizerError where there is no template, it refuses the messages, or it goes over a bound.
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
