"""The laws of a cache index as plain loops over numpy: slow, and written from the specification only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

IntRows = list[list[int]]


@dataclass
class ReferenceIndex:
    """A cache index. Every array is nested Python lists of ints, of bools in sees."""

    kind: str  # "tabled", "whole" or "packed"
    pos: IntRows
    table: IntRows | None = None
    row: list[int] | None = None
    entries: dict[int, IntRows] = field(default_factory=dict)
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

    def table_row(self, row: int) -> int | None:
        """The row of the table of a batch row's sequence; None where it has none."""
        sequence = row if self.row is None else self.row[row]
        return sequence if self.table is not None and 0 <= sequence < len(self.table) else None

    def position(self, row: int, token: int) -> int | None:
        """The position of a token; None for padding."""
        if self.table is not None and self.table_row(row) is None:
            return None
        position = self.pos[row][token]
        return position if position >= 0 else None

    def token_positions(self, row: int) -> list[int]:
        """The positions of a batch row's tokens, without padding."""
        positions = [self.position(row, token) for token in range(self.seq)]
        return [position for position in positions if position is not None]

    def positions(self) -> np.ndarray:
        last = (self.seq if self.table is None else len(self.table[0])) - 1
        out = np.zeros((self.batch, self.seq), np.int32)
        for b in range(self.batch):
            for i in range(self.seq):
                position = self.position(b, i)
                out[b, i] = 0 if position is None else min(position, last)
        return out

    def sequence_start(self, row: int, token: int) -> int:
        """The token that begins this one's sequence, in a packed row."""
        return token - self.pos[row][token]

    # Columns: each is ("slot", slot, position), ("token", token, position), or ("none", 0, position) without an entry

    def columns_of(self, row: int) -> list[tuple[str, int, int | None]]:
        m = self.every
        if self.table is None:
            if m == 1:
                return [("token", i, self.position(row, i)) for i in range(self.seq)]
            token_at = {self.position(row, i): i for i in range(self.seq)}
            ends = [j * m + m - 1 for j in range((self.seq + m - 1) // m)]
            return [("token", token_at[end], end) if end in token_at else ("none", 0, end) for end in ends]
        table = self.table if m == 1 else self.entries[m]
        table_row = self.table_row(row)
        columns: list[tuple[str, int, int | None]]
        slots = [-1] * len(table[0]) if table_row is None else table[table_row]
        columns = [("slot", slot, j if m == 1 else j * m + m - 1) for j, slot in enumerate(slots)]
        if self.slots is not None:
            columns += [("token", i, self.position(row, i)) for i in range(self.seq)]
        return columns

    def token_sees(self, row: int, token: int, column: int) -> bool:
        columns = self.columns_of(row)
        if not 0 <= column < len(columns):
            return False
        kind, number, column_position = columns[column]
        position = self.position(row, token)
        if position is None or column_position is None or column_position > position:
            return False
        if self.window is not None and column_position <= position - self.window:
            return False
        if self.kind == "packed" and self.sequence_start(row, token) != self.sequence_start(row, number):
            return False
        if self.slots is not None and self.sees is not None:
            if kind == "token":
                return self.sees[row][token][number]
            return column_position < min(self.token_positions(row))
        return True

    def mask(self) -> np.ndarray:
        rows = []
        for b in range(self.batch):
            for i in range(self.seq):
                columns = range(len(self.columns_of(b))) if self.columns is None else self.columns[b][i]
                rows.append([self.token_sees(b, i, j) for j in columns])
        return np.array(rows, bool).reshape(self.batch, self.seq, -1)

    # Pools

    def target_slot(self, row: int, token: int) -> int | None:
        """The slot where the token stores, inside the pool or not; None where it has none."""
        position = self.position(row, token)
        if position is None or self.table is None:
            return None
        if self.slots is not None:
            return self.slots[row][token]
        for _, slot, column_position in self.columns_of(row):
            if column_position == position:
                return slot
        return None

    def target_slots(self, size: int) -> list[int]:
        """The slots of a pool of that size where the call stores, one per storing token."""
        targets = [self.target_slot(b, i) for b in range(self.batch) for i in range(self.seq)]
        return [slot for slot in targets if slot is not None and 0 <= slot < size]

    def write(self, values: np.ndarray, pool: np.ndarray) -> np.ndarray:
        pool = pool.copy()
        for b in range(self.batch):
            for i in range(self.seq):
                slot = self.target_slot(b, i)
                if slot is not None and 0 <= slot < len(pool):
                    pool[slot] = values[b, i]
        return pool

    def extend(self, values: np.ndarray, pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pool = self.write(values, pool)
        rows = []
        for b in range(self.batch):
            columns = self.columns_of(b)
            entries = []
            for kind, number, _ in columns:
                if kind == "token":
                    entries.append(values[b, number])
                elif kind == "slot" and 0 <= number < len(pool):
                    entries.append(pool[number])
                else:
                    entries.append(np.zeros(pool.shape[1:], pool.dtype))
            zero = np.zeros(pool.shape[1:], pool.dtype)
            if self.columns is not None:
                seen = [
                    [entries[j] if self.token_sees(b, i, j) else zero for j in self.columns[b][i]]
                    for i in range(self.seq)
                ]
            else:
                # The call's own values are columns without zeroing; a slot's are zero where no token sees them.
                seen = [
                    entry if kind == "token" or any(self.token_sees(b, i, j) for i in range(self.seq)) else zero
                    for j, (entry, (kind, _, _)) in enumerate(zip(entries, columns, strict=True))
                ]
            rows.append(seen)
        return np.array(rows, pool.dtype), pool

    def advance(self) -> ReferenceIndex:
        next_positions = [[max(self.token_positions(b), default=-1) + 1] for b in range(self.batch)]
        return replace(self, pos=next_positions, columns=None, slots=None, sees=None)


def reference_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """softmax(query · keysᵀ) · values over the columns of mask [n, context]; a query that sees none gives zero."""
    out = np.zeros((len(query), values.shape[1]))
    for i, visible in enumerate(mask):
        if visible.any():
            scores = keys[visible].astype(np.float64) @ query[i].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[i] = weights / weights.sum() @ values[visible].astype(np.float64)
    return out
