"""The rewrites, in their order.

1. fold: what depends on constants alone is computed now; later rewrites then see constants where exporters wrote chains.
2. positions: a graph that takes positions from the length of its cache gets an input for them, so that it runs over a buffer.
3. embedding: before linear, so that a head tied to the embedding finds its table.
4. linear: products with a constant matrix become layers.
"""

from __future__ import annotations

from converters.match import Record, Rewrite, apply
from converters.passes.embedding import embedding
from converters.passes.fold import fold
from converters.passes.linear import linear
from converters.passes.positions import positions
from mlx_transmuter.program import Program

ORDER: tuple[Rewrite, ...] = (fold, positions, embedding, linear)


def rewrite(program: Program, order: tuple[Rewrite, ...] = ORDER) -> tuple[Program, list[Record]]:
    """The program after the rewrites of `order`, and what each did."""
    records = []
    for one in order:
        program, record = apply(program, one)
        records.append(record)
    return program, records


__all__ = ["ORDER", "rewrite"]
