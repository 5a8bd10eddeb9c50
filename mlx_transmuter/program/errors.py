"""The errors of programs and of their signatures."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class ProgramError(TransmuterError):
    """A program that is incomplete or malformed; `where` is the file, the node or the weight."""

    def __init__(self, where: str, found: str, expected: str, do: str = "convert the model again"):
        super().__init__(where, found, expected, do)
