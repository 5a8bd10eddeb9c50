"""The one public error of generation."""

from mlx_transmuter.errors import TransmuterError


class GenerationError(TransmuterError):
    """A setting or an input that generation cannot take; `where` names it."""
