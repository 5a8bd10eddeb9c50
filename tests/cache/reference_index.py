"""The laws of a cache index as plain loops over numpy: slow, and written from the specification alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

IntRows = list[list[int]]


@dataclass
class ReferenceIndex:
    """One index. case is "tabled", "whole" or "packed"; every list is nested Python lists of ints (bools in sees)."""

    case: str
    pos: IntRows
    table: IntRows | None = None
    row: list[int] | None = None
    blocks: dict[int, IntRows] = field(default_factory=dict)
    every: int = 1
    window: int | None = None
    columns: list[IntRows] | None = None
    slots: IntRows | None = None
    sees: list[list[list[bool]]] | None = None

    # Tokens

    @property
    def batch(self) -> int:
        return len(self.pos)

    @property
    def seq(self) -> int:
        return len(self.pos[0])

    def table_row(self, lane: int) -> int | None:
        """The row of the table that the lane's tokens belong to; None where it has none."""
        named = lane if self.row is None else self.row[lane]
        return named if self.table is not None and 0 <= named < len(self.table) else None

    def position(self, lane: int, token: int) -> int | None:
        """None for padding."""
        if self.table is not None and self.table_row(lane) is None:
            return None
        p = self.pos[lane][token]
        return p if p >= 0 else None

    def positions(self) -> np.ndarray:
        last = (self.seq if self.table is None else len(self.table[0])) - 1
        out = np.zeros((self.batch, self.seq), np.int32)
        for b in range(self.batch):
            for i in range(self.seq):
                p = self.position(b, i)
                out[b, i] = 0 if p is None else min(p, last)
        return out

    def sequence_start(self, lane: int, token: int) -> int:
        """The token of the lane that begins this one's sequence, in a packed lane."""
        return token - self.pos[lane][token]

    # Columns: each is ("slot", slot, place) or ("token", token, place), or ("none", 0, place) where nothing is there

    def columns_of(self, lane: int) -> list[tuple[str, int, int | None]]:
        m = self.every
        if self.table is None:
            if m == 1:
                return [("token", i, self.position(lane, i)) for i in range(self.seq)]
            held = {self.position(lane, i): i for i in range(self.seq)}
            places = [j * m + m - 1 for j in range((self.seq + m - 1) // m)]
            return [("token", held[p], p) if p in held else ("none", 0, p) for p in places]
        table = self.table if m == 1 else self.blocks[m]
        r = self.table_row(lane)
        slots = [-1] * len(table[0]) if r is None else table[r]
        out = [("slot", s, j if m == 1 else j * m + m - 1) for j, s in enumerate(slots)]
        if self.slots is not None:
            out += [("token", i, self.position(lane, i)) for i in range(self.seq)]
        return out

    def token_sees(self, lane: int, token: int, column: int) -> bool:
        columns = self.columns_of(lane)
        if not 0 <= column < len(columns):
            return False
        kind, what, place = columns[column]
        p = self.position(lane, token)
        if p is None or place is None or place > p:
            return False
        if self.window is not None and place <= p - self.window:
            return False
        if self.case == "packed" and self.sequence_start(lane, token) != self.sequence_start(lane, what):
            return False
        if self.slots is not None and self.sees is not None:
            if kind == "token":
                return self.sees[lane][token][what]
            held = [q for i in range(self.seq) if (q := self.position(lane, i)) is not None]
            return place < min(held)
        return True

    def mask(self) -> np.ndarray:
        rows = []
        for b in range(self.batch):
            for i in range(self.seq):
                chosen = range(len(self.columns_of(b))) if self.columns is None else self.columns[b][i]
                rows.append([self.token_sees(b, i, j) for j in chosen])
        return np.array(rows, bool).reshape(self.batch, self.seq, -1)

    # Pools

    def target_slot(self, lane: int, token: int) -> int | None:
        """The slot the token stores at, in range or not; None where it has none."""
        p = self.position(lane, token)
        if p is None or self.table is None:
            return None
        if self.slots is not None:
            return self.slots[lane][token]
        for _, slot, place in self.columns_of(lane):
            if place == p:
                return slot
        return None

    def target_slots(self, size: int) -> list[int]:
        """The slots of a pool of that size that the call stores at, one per storing token."""
        found = [self.target_slot(b, i) for b in range(self.batch) for i in range(self.seq)]
        return [t for t in found if t is not None and 0 <= t < size]

    def write(self, values: np.ndarray, pool: np.ndarray) -> np.ndarray:
        pool = pool.copy()
        for b in range(self.batch):
            for i in range(self.seq):
                t = self.target_slot(b, i)
                if t is not None and 0 <= t < len(pool):
                    pool[t] = values[b, i]
        return pool

    def extend(self, values: np.ndarray, pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pool = self.write(values, pool)
        lanes = []
        for b in range(self.batch):
            columns = self.columns_of(b)
            entries = []
            for kind, what, _ in columns:
                if kind == "token":
                    entries.append(values[b, what])
                elif kind == "slot" and 0 <= what < len(pool):
                    entries.append(pool[what])
                else:
                    entries.append(np.zeros(pool.shape[1:], pool.dtype))
            zero = np.zeros(pool.shape[1:], pool.dtype)
            if self.columns is not None:
                read = [
                    [entries[j] if self.token_sees(b, i, j) else zero for j in self.columns[b][i]]
                    for i in range(self.seq)
                ]
            else:
                # A call's own values are columns as they are; a slot's are zero where no token sees them.
                read = [
                    entry if kind == "token" or any(self.token_sees(b, i, j) for i in range(self.seq)) else zero
                    for j, (entry, (kind, _, _)) in enumerate(zip(entries, columns, strict=True))
                ]
            lanes.append(read)
        return np.array(lanes, pool.dtype), pool

    def advance(self) -> ReferenceIndex:
        after = []
        for b in range(self.batch):
            held = [q for i in range(self.seq) if (q := self.position(b, i)) is not None]
            after.append([max(held) + 1 if held else 0])
        return replace(self, pos=after, columns=None, slots=None, sees=None)


def reference_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """softmax(query · keysᵀ) · values over the columns of mask [n, context]; a query that sees none gives zero."""
    out = np.zeros((len(query), values.shape[1]))
    for i, seen in enumerate(mask):
        if seen.any():
            scores = keys[seen].astype(np.float64) @ query[i].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[i] = weights / weights.sum() @ values[seen].astype(np.float64)
    return out
