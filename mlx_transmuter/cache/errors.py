"""CacheError: the cache's one error."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class CacheError(TransmuterError):
    """An operation that the cache cannot do; `where` names the method and its argument."""
