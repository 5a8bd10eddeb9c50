"""CacheError, and the one kind of it that a caller may want to tell apart."""

from __future__ import annotations

from mlx_transmuter.errors import TransmuterError


class CacheError(TransmuterError):
    """An operation that the cache cannot do; `where` names the method and its argument."""


class CacheFullError(CacheError):
    """A cache of limited size that has no slots left to give, and nothing left to evict. What is stored stays."""
