"""The structure of a CacheIndex: what a compiled step depends on beside shapes, its arrays, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_transmuter.cache.error import CacheError

if TYPE_CHECKING:
    from mlx_transmuter.cache.index import CacheIndex

Signature = tuple[tuple[Any, ...], ...]


def walked(index: CacheIndex) -> tuple[Signature, list[mx.array]]:
    """(signature, leaves); see CacheIndex.walk."""
    signature = (
        ("tokens", index._case, index._row is not None, tuple(m for m, _ in index._blocks)),
        ("every", index._every),
        ("window", index._window),
        ("columns", index._columns is not None),
        ("draft", index._sees is not None),
        ("run", index._stride if index._narrowed else None),
        ("spare", index._spare),
        ("keep", index._table is None and index._slots is not None),
        ("ring", index._ring),
    )
    leaves = [index._row, index._pos, index._table, *(table for _, table in index._blocks)]
    leaves += [index._columns, index._slots, index._sees]
    return signature, [leaf for leaf in leaves if leaf is not None]


def fields(signature: Signature, leaves: Sequence[mx.array]) -> dict[str, Any]:
    """The fields of the index of a walk. Raises CacheError for another number of leaves than the signature's."""
    (_, case, has_row, sizes), *reports = signature
    every, window, has_columns, has_draft, stride, spare, keeps, ring = (report for _, report in reports)
    tabled = case == "tabled"
    wanted = 1 + tabled + has_row + len(sizes) + has_columns + 2 * has_draft + keeps
    if len(leaves) != wanted:
        raise CacheError("CacheIndex.from_walk", f"{len(leaves)} leaves", f"{wanted} for {signature}")
    rest = iter(leaves)
    return {
        "_case": case,
        "_row": next(rest) if has_row else None,
        "_pos": next(rest),
        "_table": next(rest) if tabled else None,
        "_blocks": tuple((m, next(rest)) for m in sizes),
        "_every": every,
        "_window": window,
        "_columns": next(rest) if has_columns else None,
        "_slots": next(rest) if has_draft or keeps else None,
        "_sees": next(rest) if has_draft else None,
        "_stride": stride,
        "_narrowed": stride is not None,
        "_spare": spare,
        "_ring": ring,
    }
