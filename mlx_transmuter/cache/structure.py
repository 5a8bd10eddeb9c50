"""The structure of a CacheIndex: what a compiled step depends on beside shapes, its arrays, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_transmuter.cache.errors import CacheError

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex

IndexSignature = tuple[tuple[Any, ...], ...]


def walk_index(index: CacheIndex) -> tuple[IndexSignature, list[mx.array]]:
    """(signature, leaves); see CacheIndex.walk."""
    signature = (
        ("tokens", index.kind, index.table_row is not None, tuple(m for m, _ in index.every_tables)),
        ("every", index.positions_per_column),
        ("window", index.window_size),
        ("columns", index.selected_columns is not None),
        ("draft", index.draft_mask is not None),
        ("run", index.run_stride if index.run_in_signature else None),
        ("spare", index.spare_row),
        ("keep", index.table is None and index.store_slots is not None),
        ("ring", index.is_ring),
    )
    leaves = [index.table_row, index.token_positions, index.table, *(table for _, table in index.every_tables)]
    leaves += [index.selected_columns, index.store_slots, index.draft_mask]
    return signature, [leaf for leaf in leaves if leaf is not None]


def fields_from_walk(signature: IndexSignature, leaves: Sequence[mx.array]) -> dict[str, Any]:
    """The fields of the index of a walk. Raises CacheError for another number of leaves than the signature's."""
    (_, case, has_row, sizes), *reports = signature
    every, window, has_columns, has_draft, stride, spare, keeps, ring = (report for _, report in reports)
    tabled = case == "tabled"
    wanted = 1 + tabled + has_row + len(sizes) + has_columns + 2 * has_draft + keeps
    if len(leaves) != wanted:
        raise CacheError("CacheIndex.from_walk", f"{len(leaves)} leaves", f"{wanted} for {signature}")
    rest = iter(leaves)
    return {
        "kind": case,
        "table_row": next(rest) if has_row else None,
        "token_positions": next(rest),
        "table": next(rest) if tabled else None,
        "every_tables": tuple((m, next(rest)) for m in sizes),
        "positions_per_column": every,
        "window_size": window,
        "selected_columns": next(rest) if has_columns else None,
        "store_slots": next(rest) if has_draft or keeps else None,
        "draft_mask": next(rest) if has_draft else None,
        "run_stride": stride,
        "run_in_signature": stride is not None,
        "spare_row": spare,
        "is_ring": ring,
    }
