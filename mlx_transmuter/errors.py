"""The base class of every error that this package raises on purpose, and the one format of their messages.

Each room has a thin subclass (`SourceError`, `ConvertError`, `ProgramError`, `OperatorError`, `DecoderError`,
`CacheError`, `GenerationError`, …), so that `except TransmuterError` catches them all; each is a ValueError.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any


class TransmuterError(ValueError):
    """Something given to the package that it cannot take.

    where: the file, folder, argument or setting at fault. node: the node of the graph, where it is one. found: what
    stands there. expected: what should. do: what mends it. All are text, "" where there is nothing to say.
    """

    def __init__(self, where: object = "", found: object = "", expected: object = "", do: str = "", node: str = ""):
        self.where, self.found, self.expected, self.do, self.node = str(where), str(found), str(expected), do, node
        place = "".join(f"{part}: " for part in (self.where, f"node {node}" if node else "") if part)
        text = f"{place}found {self.found}" + (f"; expected {self.expected}" if self.expected else "")
        super().__init__(text + (f". To fix it: {do.rstrip('.')}." if do else "."))


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
    except ValueError:  # Python writes no int of more than some thousands of digits
        return f"a {type(value).__name__} that is too long to write"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """The first line of what another library says of its error, or the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
