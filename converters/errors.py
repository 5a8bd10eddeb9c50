"""The one error of the converter."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class ConvertError(TransmuterError):
    """A source that cannot be converted; `where` is the file or the folder, `node` the graph's node at fault."""
