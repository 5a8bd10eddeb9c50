"""Layered: the index of a step whose layers differ in what they see: all columns, or those of a window alone."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_transmuter.cache.index import CacheIndex


@dataclass(frozen=True, eq=False)
class HybridIndex:
    """Two indices of the same tokens over the same slots, of different numbers of columns.

    everything: of the layers that see all. local: a ring of the columns that a window can show, so that a layer with a
    window reads these alone. Which one a layer reads by follows from the mask that it has: it is as wide.
    """

    full_index: CacheIndex
    window_index: CacheIndex

    def window(self, w: int) -> CacheIndex:
        """The local index, of tokens that see the last w positions."""
        return self.window_index.window(w)

    def visible(self) -> mx.array:
        """The mask of the layers that see all; see CacheIndex.visible."""
        return self.full_index.visible()

    def positions(self) -> mx.array:
        """The tokens' positions; see CacheIndex.positions."""
        return self.full_index.positions()

    def index_for(self, columns: int) -> CacheIndex:
        """The index of that many columns."""
        return self.window_index if columns == self.window_index.context else self.full_index
