"""HybridIndex: the index of a step of which some layers attend to the whole context and others through a window."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_transmuter.cache.index import CacheIndex


@dataclass(frozen=True, eq=False)
class HybridIndex:
    """Two indices of the same tokens over the same slots, with different numbers of columns.

    full_index: of the layers that attend to the whole context. window_index: a ring of the columns that a window can
    show, so that a layer with a window reads these alone. The width of a layer's mask says which of the two it reads
    by.
    """

    full_index: CacheIndex
    window_index: CacheIndex

    def window(self, w: int) -> CacheIndex:
        """The window index, of tokens that attend to the last w positions."""
        return self.window_index.window(w)

    def visible(self) -> mx.array:
        """The mask of the layers that attend to the whole context; see CacheIndex.visible."""
        return self.full_index.visible()

    def positions(self) -> mx.array:
        """The tokens' positions; see CacheIndex.positions."""
        return self.full_index.positions()

    @property
    def max_position(self) -> int | None:
        """The largest number that `positions` gives; see CacheIndex.max_position."""
        return self.full_index.max_position

    def index_for(self, columns: int) -> CacheIndex:
        """The index of that many columns."""
        return self.window_index if columns == self.window_index.context else self.full_index
