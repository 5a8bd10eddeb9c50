"""Random indices, each as a CacheIndex and as a ReferenceIndex of the same arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from reference_index import ReferenceIndex

from mlx_transmuter.cache import CacheIndex

POOL_DTYPES = [np.float32, np.float16, np.int32, np.uint8, np.bool_, np.int64]
ROW_SHAPES = [(), (3,), (2, 2), (4,)]


@dataclass
class IndexCase:
    index: CacheIndex
    reference: ReferenceIndex
    pool: np.ndarray  # with NaN and infinity anywhere
    values: np.ndarray

    def __repr__(self) -> str:
        return f"IndexCase({self.reference}, pool of {len(self.pool)} slots, {self.pool.dtype})"


def random_table(rng: np.random.Generator, rows: int, width: int, num_slots: int, share: bool) -> np.ndarray:
    """A table with no slot twice, some holes and some numbers outside the pool; with share, two rows share a prefix."""
    table = rng.permutation(max(num_slots, rows * width))[: rows * width].reshape(rows, width)
    kind = rng.random((rows, width))
    table = np.where(kind < 0.15, rng.choice([-1, -7, -(2**31)]), table)
    table = np.where(kind > 0.95, rng.choice([num_slots, num_slots + 5, 2**31 - 1]), table)
    if share and rows > 1:
        a, b = rng.choice(rows, 2, replace=False)
        prefix = rng.integers(0, width + 1)
        table[b, :prefix] = table[a, :prefix]
    return table.astype(np.int32)


def random_positions(rng: np.random.Generator, batch: int, seq: int, row: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Positions no sequence has twice, padding among them, some past the last column; none aims at a shared slot."""
    width = table.shape[1]
    limit = max(width + 2, batch * seq)
    pos = np.full((batch, seq), -1, np.int64)
    positions_of: dict[int, list[int]] = {}
    for b in range(batch):
        start = int(rng.integers(0, limit)) if rng.random() < 0.5 else None
        positions = positions_of.setdefault(int(row[b]), [])
        for i in range(seq):
            position = int(rng.integers(0, limit)) if start is None else start + i
            has_column = position < width and row[b] in range(len(table))
            is_shared = has_column and (table == max(0, table[row[b], position])).sum() > 1
            if rng.random() < 0.2:
                pos[b, i] = rng.choice([-1, -1, -3])
            elif position not in positions and not is_shared:
                pos[b, i] = position
                positions.append(position)
    return pos.astype(np.int32)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Random values of the dtype, with NaN, infinities and both zeros where it has them."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    values = rng.standard_normal(shape).astype(dtype)
    kind = rng.random(shape)
    for i, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0)):
        values[(kind >= 0.06 * i) & (kind < 0.06 * (i + 1))] = value
    return values


def _random_index(rng: np.random.Generator, draw: Any) -> tuple[CacheIndex, ReferenceIndex, int, dict[int, Any]]:
    """An index of a random constructor, its reference, the slots of its pool, and of the pools of its entries by size."""
    constructor = draw(st.sampled_from(["make", "make", "make", "rows", "whole", "packed"]))
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(2, 4), max_size=2, unique=True))
    if constructor == "whole":
        lens = [int(n) for n in rng.integers(0, seq + 1, batch)] if draw(st.booleans()) else None
        pos = [[max(-1, i - (seq - n)) for i in range(seq)] for n in (lens or [seq] * batch)]
        return CacheIndex.whole(batch, seq, lens), ReferenceIndex("whole", pos), int(rng.integers(0, 5)), {}
    if constructor == "packed":
        pos, lens = [], []
        for _ in range(batch):
            cuts = np.sort(rng.integers(0, seq + 1, rng.integers(1, 4)))
            counts = np.diff(cuts).tolist()
            lens.append(counts)
            pos.append([-1] * (seq - sum(counts)) + [p for n in counts for p in range(n)])
        return CacheIndex.packed(seq, lens), ReferenceIndex("packed", pos), int(rng.integers(0, 5)), {}
    if constructor == "rows":
        context = draw(st.integers(1, 7))
        lens = [int(n) for n in rng.integers(0, context + 1, batch)]
        seq = max(1, *lens)
        pos = [[max(-1, i - (seq - n)) for i in range(seq)] for n in lens]
        widths = {m: (context + m - 1) // m for m in sizes}
        tables = {m: np.arange(batch * c).reshape(batch, c).tolist() for m, c in widths.items()}
        table = np.arange(batch * context).reshape(batch, context).tolist()
        reference = ReferenceIndex("tabled", pos, table, None, tables)
        num_slots = batch * context + int(rng.integers(-1, 2)) * draw(st.booleans())
        return CacheIndex.rows(context, lens, sizes), reference, num_slots, {m: batch * c for m, c in widths.items()}
    rows, context = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    has_row = draw(st.booleans()) or rows != batch
    row = rng.choice([*range(rows), *range(rows), -1, -5, rows, rows + 3], batch) if has_row else np.arange(batch)
    num_slots = draw(st.integers(1, rows * context + 3))
    table = random_table(rng, rows, context, num_slots, draw(st.booleans()))
    pos = random_positions(rng, batch, seq, row, table)
    entries = {m: random_table(rng, rows, int(rng.integers(1, 5)), num_slots, False) for m in sizes}
    index = CacheIndex.make(pos, table, row.astype(np.int32) if has_row else None, list(entries.items()))
    tables = {m: t.tolist() for m, t in entries.items()}
    reference = ReferenceIndex("tabled", pos.tolist(), table.tolist(), row.tolist() if has_row else None, tables)
    return index, reference, num_slots, dict.fromkeys(sizes, num_slots)


@st.composite
def index_cases(draw: Any) -> IndexCase:
    """Any index that the type can hold, a pool of random width and dtype, and values for the call."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    index, reference, num_slots, block_slots = _random_index(rng, draw)
    batch, seq = reference.batch, reference.seq
    if draw(st.booleans()):
        w = draw(st.sampled_from([1, 2, 3, 5, 2**31 - 1, 2**40]))
        index, reference = index.window(w), replace(reference, window=w)
    reading = draw(st.sampled_from(["all", "every", "select", "draft"]))
    if reading == "every" and reference.kind != "packed":
        has_table = reference.table is not None
        m = draw(st.sampled_from(sorted(reference.entries) or [1]) if has_table else st.integers(1, 4))
        index, reference, num_slots = index.every(m), replace(reference, every=m), block_slots.get(m, num_slots)
    if reading == "select" or (reading == "every" and draw(st.booleans())):
        width = len(reference.columns_of(0))
        columns = rng.integers(-2, width + 2, (batch, seq, draw(st.integers(1, 5))))
        index, reference = index.select(columns.astype(np.int32)), replace(reference, columns=columns.tolist())
    if reading == "draft" and reference.table is not None:
        tables = [reference.table, *reference.entries.values()]
        used_slots = {slot for table in tables for slots in table for slot in slots}
        free_slots = [slot for slot in range(num_slots + 3) if slot not in used_slots]
        free_slots += range(num_slots + 10, num_slots + 10 + batch * seq)
        slots = rng.permutation(free_slots)[: batch * seq].reshape(batch, seq)
        slots = np.where(rng.random((batch, seq)) < 0.2, -1, slots)
        sees = rng.random((batch, seq, seq)) < 0.6
        index = index.draft(slots.astype(np.int32), sees)
        reference = replace(reference, slots=slots.tolist(), sees=sees.tolist())
    dtype, row_shape = draw(st.sampled_from(POOL_DTYPES)), draw(st.sampled_from(ROW_SHAPES))
    pool = random_array(rng, (num_slots, *row_shape), dtype)
    return IndexCase(index, reference, pool, random_array(rng, (batch, seq, *row_shape), dtype))


def assert_same_bits(array: mx.array, expected: np.ndarray) -> None:
    """Asserts the same shape, dtype and bits, NaN and the sign of zero included."""
    actual = np.array(array)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes()
