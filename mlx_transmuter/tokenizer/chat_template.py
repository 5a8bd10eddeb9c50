"""Chat templates: where a folder has them, and how one turns messages into the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_transmuter.errors import first_line, shorten
from mlx_transmuter.limited_files import MAX_TEMPLATE_BYTES, decode_utf8, read_json_object, read_limited
from mlx_transmuter.tokenizer.errors import TokenizerError


class ChatTemplates:
    """The chat templates of a tokenizer by name ("default", "tool_use", …), rendered in Jinja's immutable sandbox."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]):
        """sources: Jinja's text of each template. special_tokens: variables of all templates, such as bos_token."""
        self._sources, self._special_tokens = dict(sources), dict(special_tokens)
        self._compiled: dict[str, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_vars: Mapping[str, Any],
    ) -> str:
        """The text of the messages; see Tokenizer.apply_chat_template. Raises TokenizerError."""
        wrong = next((m for m in messages if not isinstance(m, Mapping) or "role" not in m), None)
        if isinstance(messages, Mapping) or wrong is not None:
            raise TokenizerError(
                f"chat message {shorten(wrong)}", expected='dicts such as {"role": "user", "content": "Hi"}'
            )
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            names = f"only {', '.join(self._sources)}" if self._sources else "none"
            raise TokenizerError(f"no chat template in the tokenizer ({names})", do="give the prompt as plain text")
        variables: dict[str, Any] = {**self._special_tokens, "tools": tools, "documents": None, **template_vars}
        from mlx_transmuter.tokenizer.template_environment import TemplateEnvironment, rendering_budget

        try:
            with rendering_budget():
                if name not in self._compiled:
                    self._compiled[name] = TemplateEnvironment().from_string(self._sources[name])
                return self._compiled[name].render(
                    messages=messages, add_generation_prompt=add_generation_prompt, **variables
                )
        except Exception as error:  # a template is a program: it may fail in any way
            raise TokenizerError(f"a chat template that failed: {first_line(error)}") from error


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files win over the text inside tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    config = {**config, **read_json_object(folder / "chat_template.json", TokenizerError)}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, dict):
        templates.update({str(name): str(text) for name, text in inside.items()})
    elif isinstance(inside, list):
        try:
            templates.update({str(entry["name"]): str(entry["template"]) for entry in inside})
        except (TypeError, KeyError):
            raise TokenizerError(
                "a chat_template that is a list of something else",
                where=folder / "tokenizer_config.json",
                expected='a text, or a list of {"name": ..., "template": ...}',
            ) from None
    files = {"default": folder / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))})
    for name, file in files.items():
        if file.exists():
            data = read_limited(file, MAX_TEMPLATE_BYTES, TokenizerError)
            templates[name] = decode_utf8(data, file, TokenizerError)
    return templates
