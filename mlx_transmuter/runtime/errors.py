"""The error of the runtime."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class DecoderError(TransmuterError):
    """A step or a session that the decoder cannot run."""

    def __init__(self, found: str, expected: str, do: str = ""):
        super().__init__("", found, expected, do)
