"""Notices: what a user should know and no error, a line each on stderr."""

from __future__ import annotations

import sys

from mlx_transmuter.errors import printable_text


def print_notice(line: str) -> None:
    """Prints one line on stderr, after the name of the program; nothing where stderr is closed."""
    if sys.stderr is not None:  # for print, None is stdout
        print(f"mlx-transmuter: {printable_text(line, 3000)}", file=sys.stderr)


def print_notice_once(line: str | None, printed: set[str]) -> None:
    """Prints a notice, if there is one that is not among those printed before, to which it then belongs."""
    if line is not None and line not in printed:
        printed.add(line)
        print_notice(line)
