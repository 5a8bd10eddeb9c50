"""The base class of every error that this package raises on purpose, and the one format of their messages.

Each room has a thin subclass (`SourceError`, `ConvertError`, `ProgramError`, `OperatorError`, `DecoderError`,
`CacheError`, `GenerationError`, …), so that `except TransmuterError` catches them all; each is a ValueError.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Sequence
from typing import Any


class TransmuterError(ValueError):
    """Something given to the package that it cannot take.

    where: the file, folder, argument or setting at fault. node: the node of the graph, where it is one. found: what
    stands there. expected: what should. do: what mends it. All are text, "" where there is nothing to say. The fields
    stay as they are; the message has each as `printable_text`.
    """

    def __init__(self, where: object = "", found: object = "", expected: object = "", do: str = "", node: str = ""):
        self.where, self.found, self.expected, self.do, self.node = str(where), str(found), str(expected), do, node
        where, found, expected, do, node = (printable_text(part) for part in (where, found, expected, do, node))
        place = "".join(f"{part}: " for part in (where, f"node {node}" if node else "") if part)
        text = f"{place}found {found}" + (f"; expected {expected}" if expected else "")
        super().__init__(text + (f". To fix it: {do.rstrip('.')}." if do else "."))


def printable_text(value: object, most: int = 500) -> str:
    """The value's text as one line that a terminal can print whatever file it is from.

    Line breaks and tabs become spaces; other characters that are not printable (control characters, marks that turn the
    direction of writing, halves of surrogates) are escaped as Python writes them. Of a longer text the middle is left
    out, so that it has `most` characters or fewer.
    """
    text = str(value)
    if len(text) > most:  # the rest of the middle is left out below; escaping all of a long text would take long
        text = text[:most] + text[-most:]
    text = re.sub(r"[\r\n\t]", " ", text)
    if not text.isprintable():
        text = "".join(char if _is_printable(char) else repr(char)[1:-1] for char in text)
    if len(text) > most:
        tail = (most - 3) // 3
        text = text[: most - 3 - tail] + "..." + text[-tail:]
    return text


def _is_printable(char: str) -> bool:
    """Whether the character is printable: spaces of all widths and the joiners of Persian, Hindi and emoji are, too."""
    return char.isprintable() or char in "\u200c\u200d" or unicodedata.category(char) == "Zs"


def question_of_closest(name: str, names: Sequence[str]) -> str:
    """The question whether the one of `names` most like `name` is meant, after a space; "" where none is like it."""
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def did_you_mean(name: Any, names: Sequence[str]) -> str:
    """The remedy that names the one of `names` most like `name`; "" where none is."""
    close = difflib.get_close_matches(str(name), names, n=1)
    return f'use "{close[0]}"' if close else ""


def abbreviate(names: Sequence[str], most: int = 8) -> str:
    """The first `most` names and how many more there are; "nothing" for none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "nothing"


def shorten(value: object, most: int = 80) -> str:
    """The value as Python writes it, at most that many characters of it."""
    try:
        text = repr(value)
    except Exception:  # an int of more than some thousands of digits, or an object whose __repr__ fails
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """The first line of what another library says of its error, or the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
