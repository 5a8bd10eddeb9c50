"""Writes docs/settings.md, the table of the settings of generation, from the table that the code reads."""

from __future__ import annotations

from pathlib import Path

from mlx_transmuter.generation.settings import SETTINGS

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """# Settings of generation

Written by `scripts/list_settings.py`. The names are those of generation_config.json; the defaults and the ranges are
those of transformers 4.57.6, with one exception: without max_new_tokens and max_length (or with its default, 20, in
generation_config.json) a row gets at most 256 new tokens, which is the rule of the pipelines of transformers; its
`generate` stops at 20 tokens, prompt included. Whatever the two say, a row ends where a table of positions of its
graph does; the model's max_position_embeddings ends none. Token ids that the vocabulary lacks are refused where
transformers refuses them. *supported*: it does what it does there; *goldens* are results of transformers on the
models of the tests, alone and in ragged batches, greedy and with beams. *refused*: it would change the tokens and is
not supported, so it is an error by name. *neutral*: it changes no token and takes any value. An unknown name is an
error.

| name | status | what it does, or what to do | checked by |
|---|---|---|---|
"""


def settings_page() -> str:
    """Returns the text of the page."""
    rows = []
    for name, setting in SETTINGS.items():
        checks = [*(["goldens"] if setting.has_goldens else []), *(["tests"] if setting.status == "supported" else [])]
        rows.append(f"| `{name}` | {setting.status} | {setting.note} | {', '.join(checks)} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(settings_page(), encoding="utf-8")
