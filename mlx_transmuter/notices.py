"""Notices: what a user should know and no error, a line each on stderr."""

from __future__ import annotations

import sys


def print_notice(line: str) -> None:
    """Prints one line on stderr, after the name of the program."""
    print(f"mlx-transmuter: {line}", file=sys.stderr)
