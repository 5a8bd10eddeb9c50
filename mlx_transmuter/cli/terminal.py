"""Text of models and files on stdout: into a pipe as it is, on a terminal without what could change its screen."""

from __future__ import annotations

import re
import sys

# Control characters but for line feed and tab; line and paragraph separators; the marks that turn the direction of
# writing; halves of surrogates.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def print_text(text: str, end: str = "\n") -> None:
    """Prints text on stdout at once; on a terminal each control character is escaped as Python writes it, alone, so
    that a sequence cut into several pieces is escaped, too."""
    print(escape_control_characters(text) if sys.stdout.isatty() else text, end=end, flush=True)


def escape_control_characters(text: str) -> str:
    """Returns the text with what would steer a terminal as Python writes it; line feeds and tabs stay."""
    return _CONTROL_CHARACTERS.sub(lambda match: repr(match.group())[1:-1], text)
