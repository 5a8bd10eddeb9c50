"""The error of tokenizers and chat templates."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class TokenizerError(TransmuterError):
    """A tokenizer or a chat template that cannot be used; `where` is its file."""

    def __init__(self, found: str, *, where: object = "", expected: str = "", do: str = ""):
        super().__init__(where, found, expected, do)
