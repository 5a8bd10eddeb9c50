"""A budget of constants: a small file may have many nodes that each give a large constant."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

# The most bytes of the constants that one pass adds; no decoder has a hundredth of it.
MAX_ADDED_BYTES = 2**24


class ConstantBudget:
    """The bytes of constants that a pass may still add."""

    def __init__(self) -> None:
        self._remaining = MAX_ADDED_BYTES

    def take(self, arrays: Iterable[np.ndarray]) -> bool:
        """Returns whether the arrays may become constants, and counts them then."""
        size = sum(array.nbytes for array in arrays)
        if size > self._remaining:
            return False
        self._remaining -= size
        return True
