"""Random indices, each as the arguments of a CacheIndex and as the Brute of the same ones."""

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
    pool: np.ndarray  # NaN and infinity anywhere
    values: np.ndarray

    def __repr__(self) -> str:
        return f"Case({self.reference}, pool of {len(self.pool)} slots, {self.pool.dtype})"


def random_table(rng: np.random.Generator, rows: int, width: int, pool: int, share: bool) -> np.ndarray:
    """A table: no slot twice, some holes, some numbers outside the pool; maybe a prefix shared by two rows."""
    table = rng.permutation(max(pool, rows * width))[: rows * width].reshape(rows, width)
    odd = rng.random((rows, width))
    table = np.where(odd < 0.15, rng.choice([-1, -7, -(2**31)]), table)
    table = np.where(odd > 0.95, rng.choice([pool, pool + 5, 2**31 - 1]), table)
    if share and rows > 1:
        a, b = rng.choice(rows, 2, replace=False)
        prefix = rng.integers(0, width + 1)
        table[b, :prefix] = table[a, :prefix]
    return table.astype(np.int32)


def random_positions(rng: np.random.Generator, lanes: int, seq: int, row: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Positions no sequence has twice, padding among them, some past the last column; none aims at a shared slot."""
    width = table.shape[1]
    reach = max(width + 2, lanes * seq)
    pos = np.full((lanes, seq), -1, np.int64)
    used: dict[int, list[int]] = {}
    for b in range(lanes):
        start = int(rng.integers(0, reach)) if rng.random() < 0.5 else None
        taken = used.setdefault(int(row[b]), [])
        for i in range(seq):
            p = int(rng.integers(0, reach)) if start is None else start + i
            shared = p < width and row[b] in range(len(table)) and (table == max(0, table[row[b], p])).sum() > 1
            if rng.random() < 0.2:
                pos[b, i] = rng.choice([-1, -1, -3])
            elif p not in taken and not shared:
                pos[b, i] = p
                taken.append(p)
    return pos.astype(np.int32)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Random values of the dtype, with NaN, infinities and both zeros where it has them."""
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    values = rng.standard_normal(shape).astype(dtype)
    odd = rng.random(shape)
    for i, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0)):
        values[(odd >= 0.06 * i) & (odd < 0.06 * (i + 1))] = value
    return values


def _random_index(rng: np.random.Generator, draw: Any) -> tuple[CacheIndex, ReferenceIndex, int, dict[int, int]]:
    case = draw(st.sampled_from(["make", "make", "make", "rows", "whole", "packed"]))
    batch, seq = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(2, 4), max_size=2, unique=True))
    if case == "whole":
        lens = [int(n) for n in rng.integers(0, seq + 1, batch)] if draw(st.booleans()) else None
        pos = [[max(-1, i - (seq - n)) for i in range(seq)] for n in (lens or [seq] * batch)]
        return CacheIndex.whole(batch, seq, lens), ReferenceIndex("whole", pos), int(rng.integers(0, 5)), {}
    if case == "packed":
        lanes, lens = [], []
        for _ in range(batch):
            cuts = np.sort(rng.integers(0, seq + 1, rng.integers(1, 4)))
            counts = np.diff(cuts).tolist()
            lens.append(counts)
            lanes.append([-1] * (seq - sum(counts)) + [p for n in counts for p in range(n)])
        return CacheIndex.packed(seq, lens), ReferenceIndex("packed", lanes), int(rng.integers(0, 5)), {}
    if case == "rows":
        context = draw(st.integers(1, 7))
        lens = [int(n) for n in rng.integers(0, context + 1, batch)]
        seq = max(1, *lens)
        pos = [[max(-1, i - (seq - n)) for i in range(seq)] for n in lens]
        widths = {m: (context + m - 1) // m for m in sizes}
        tables = {m: np.arange(batch * c).reshape(batch, c).tolist() for m, c in widths.items()}
        table = np.arange(batch * context).reshape(batch, context).tolist()
        brute = ReferenceIndex("tabled", pos, table, None, tables)
        pool = batch * context + int(rng.integers(-1, 2)) * draw(st.booleans())
        return CacheIndex.rows(context, lens, sizes), brute, pool, {m: batch * c for m, c in widths.items()}
    rows, context = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    named = draw(st.booleans()) or rows != batch
    row = rng.choice([*range(rows), *range(rows), -1, -5, rows, rows + 3], batch) if named else np.arange(batch)
    pool = draw(st.integers(1, rows * context + 3))
    table = random_table(rng, rows, context, pool, draw(st.booleans()))
    pos = random_positions(rng, batch, seq, row, table)
    blocks = {m: random_table(rng, rows, int(rng.integers(1, 5)), pool, False) for m in sizes}
    index = CacheIndex.make(pos, table, row.astype(np.int32) if named else None, list(blocks.items()))
    tables = {m: t.tolist() for m, t in blocks.items()}
    brute = ReferenceIndex("tabled", pos.tolist(), table.tolist(), row.tolist() if named else None, tables)
    return index, brute, pool, dict.fromkeys(sizes, pool)


@st.composite
def index_cases(draw: Any) -> IndexCase:
    """Any index the type can hold, a pool of random width and dtype, and values for the call."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    index, brute, pool, blocks = _random_index(rng, draw)
    batch, seq = brute.batch, brute.seq
    if draw(st.booleans()):
        w = draw(st.sampled_from([1, 2, 3, 5, 2**31 - 1, 2**40]))
        index, brute = index.window(w), replace(brute, window=w)
    reading = draw(st.sampled_from(["all", "every", "select", "draft"]))
    if reading == "every" and brute.case != "packed":
        m = draw(st.sampled_from(sorted(brute.blocks) or [1])) if brute.table is not None else draw(st.integers(1, 4))
        index, brute, pool = index.every(m), replace(brute, every=m), blocks.get(m, pool)
    if reading == "select" or (reading == "every" and draw(st.booleans())):
        k = draw(st.integers(1, 5))
        width = len(brute.columns_of(0))
        chosen = rng.integers(-2, width + 2, (batch, seq, k))
        index, brute = index.select(chosen.astype(np.int32)), replace(brute, columns=chosen.tolist())
    if reading == "draft" and brute.table is not None:
        named = {s for table in [brute.table, *brute.blocks.values()] for slots in table for s in slots}
        spare = [s for s in range(pool + 3) if s not in named]
        extra = rng.permutation([*spare, *range(pool + 10, pool + 10 + batch * seq)])[: batch * seq]
        slots = np.where(rng.random((batch, seq)) < 0.2, -1, extra.reshape(batch, seq))
        sees = rng.random((batch, seq, seq)) < 0.6
        index = index.draft(slots.astype(np.int32), sees)
        brute = replace(brute, slots=slots.tolist(), sees=sees.tolist())
    dtype, tail = draw(st.sampled_from(POOL_DTYPES)), draw(st.sampled_from(ROW_SHAPES))
    return IndexCase(
        index, brute, random_array(rng, (pool, *tail), dtype), random_array(rng, (batch, seq, *tail), dtype)
    )


def assert_same_bits(found: mx.array, wanted: np.ndarray) -> None:
    """Same shape, same dtype, same bits, NaN and the sign of zero included."""
    got = np.array(found)
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()
