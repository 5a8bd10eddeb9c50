"""Store: the pools of a decoder's cache with the slots in them, which outlive a run where the caller keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.error import CacheError
from mlx_transmuter.cache.packing import Packing
from mlx_transmuter.cache.pool import Pools
from mlx_transmuter.cache.slots import Slots
from mlx_transmuter.cache.storage import store_rows


class Kind(NamedTuple):
    """What a slot holds in one pool: `heads` rows of `width` elements of a dtype; packed vectors, where so."""

    heads: int
    width: int
    dtype: mx.Dtype
    packing: Packing | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of a slot."""
        return self.heads * self.width * self.dtype.size


class Store:
    """Pools, one of each kind, and the Slots that say who owns which of their slots.

    Pool i is [heads · slots + 1, width]: in blocks of `block` slots, a block of each head follows the other (see
    CacheIndex.heads), and the last row is spare: what padding would store goes there, and nothing reads it.

    A run's own store has the slots that its rows need. One that outlives its runs begins with none, grows by need up to
    `limit` slots (None: without end), and then gives up the kept blocks that were used least recently.
    """

    def __init__(self, kinds: Sequence[Kind], slots: int, block: int = 1, limit: int | None = None):
        self.kinds, self.block, self.limit = tuple(kinds), block, limit
        self.copies = 0
        self.busy = False
        self.slots = Slots(slots, block)
        self.pools = self._zeros(slots)

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot in all pools."""
        return sum(kind.nbytes for kind in self.kinds)

    def open(
        self, prompts: Sequence[Sequence[int]], total: Sequence[int], *, alike: bool = False
    ) -> tuple[list[int | None], list[int]]:
        """(sequences, stored): a sequence for each row that will hold total[r] > 0 tokens, and how many of its prompt's
        first tokens are in it already. alike: the rows with a prompt begin with equally many.

        One run at a time, which `leave` ends. Raises CacheError for a second one, and for rows that need more slots
        than the limit allows.
        """
        if self.busy:
            do = "Finish the one before, or give each a cache of its own."
            raise CacheError("a prompt cache", "a run in it that isn't over", "one run at a time", do)
        opened = [self.slots.open(p) if size else None for p, size in zip(prompts, total, strict=True)]
        sequences = [None if row is None else row[0] for row in opened]
        if alike:
            least = min((row[1] for row, p in zip(opened, prompts, strict=True) if row and p), default=0)
            opened = [row and (row[0], min(row[1], least)) for row in opened]
            for row in filter(None, opened):
                self.slots.trim(*row)
        stored = [row[1] if row else 0 for row in opened]
        # A block of which a row has the beginning alone is copied when the row writes on.
        blocks = sum(-(-size // self.block) - n // self.block for n, size in zip(stored, total, strict=True))
        try:
            self._reserve(blocks * self.block)
        except BaseException:  # too many tokens, no memory, Ctrl-C
            self.leave(sequences)
            raise
        self.busy = True
        return sequences, stored

    def leave(self, sequences: Sequence[int | None]) -> None:
        """Ends a run's sequences. What they kept stays, unless a step failed and took the pools with it."""
        self.busy = False
        if self.pools.given_away:
            self.clear()
        else:
            self._end(sequences)

    def clear(self) -> None:
        """Forgets everything, and gives the memory back."""
        self.slots = Slots(0, self.block)
        self.pools = self._zeros(0)

    def grow(self, slots: int) -> None:
        """From now on there are `slots` slots, not fewer than before. Each pool is copied once, one at a time."""
        before = self.slots.slots
        self.slots.grow(slots)
        arrays = self.pools.take()
        for i, kind in enumerate(self.kinds):
            more = mx.zeros((kind.heads * (slots - before), kind.width), kind.dtype)
            arrays[i] = mx.concatenate([arrays[i][:-1], more, arrays[i][-1:]])
            mx.eval(arrays[i])
        self.pools = Pools(arrays, slots)

    def append(self, sequence: int, count: int) -> None:
        """Gives slots to `count` more tokens of the sequence; a page that it shares and now writes is copied."""
        self._copy(self.slots.append(sequence, count))

    def guess(self, counts: Sequence[int]) -> list[int]:
        """A sequence for the guesses after each row, with slots for counts[r] of them."""
        drafts = [self.slots.open()[0] for _ in counts]
        for draft, count in zip(drafts, counts, strict=True):
            self.slots.append(draft, count)
        return drafts

    def accept(self, sequences: Sequence[int | None], drafts: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """The guesses at the places kept[r] of drafts[r] become the next tokens of sequences[r]; the drafts end.

        In blocks of one token they stay in their slots. In larger blocks a token has its place by its position: there
        the kept ones are copied, which the step that stored them must have been evaluated for.
        """
        copies: list[tuple[int, int]] = []
        for sequence, draft, places in zip(sequences, drafts, kept, strict=True):
            if sequence is None:
                self.slots.free(draft)
            elif self.block == 1:
                self.slots.adopt(sequence, draft, places)
            elif places:
                self.append(sequence, len(places))
                start, count = self.slots.length(sequence) - len(places), len(places)
                names = self.slots.table([draft], self.slots.length(draft))[0][list(places)]
                own = self.slots.table([sequence], count, ring=True)[0][np.arange(start, start + count) % count]
                copies += zip(names.tolist(), own.tolist(), strict=True)
        self._copy(copies)
        if self.block > 1:
            self._end([draft for sequence, draft in zip(sequences, drafts, strict=True) if sequence is not None])

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies slots of all pools, (from, to)."""
        if not copies:
            return
        self.copies += len(copies)
        heads = {kind.heads for kind in self.kinds}
        if len(heads) > 1:
            expected = "one number of heads where pages are copied"
            raise CacheError("a copy of slots", f"pools of {sorted(heads)} heads", expected, "Use blocks of 1.")
        for n in heads:  # none where a decoder has states alone
            old, new = (self.rows(side, n) for side in zip(*copies, strict=True))
            self.pools.copy(old, new)

    def fill(self, slots: np.ndarray, values: Sequence[mx.array]) -> None:
        """Writes values, one [slots, heads, width] for each pool, at these slots."""
        arrays = self.pools.take()
        for i, (kind, value) in enumerate(zip(self.kinds, values, strict=True)):
            at = mx.array(self.rows(slots, kind.heads))
            arrays[i] = store_rows(arrays[i], at, value.swapaxes(0, 1).reshape(-1, kind.width), arrays[i].shape[0] - 1)
            mx.eval(arrays[i])
        self.pools = Pools(arrays, self.slots.slots)

    def rows(self, slots: Sequence[int] | np.ndarray, heads: int) -> np.ndarray:
        """The rows of the slots in a pool of that many heads, int32 [heads · slots], the slots of one head together."""
        at, head = np.asarray(slots, np.int32), np.arange(heads, dtype=np.int32)[:, None]
        return ((at // self.block * heads + head) * self.block + at % self.block).reshape(-1)

    def _zeros(self, slots: int) -> Pools:
        arrays = [mx.zeros((kind.heads * slots + 1, kind.width), kind.dtype) for kind in self.kinds]
        if not slots:
            mx.eval(arrays)  # a store that outlives its runs: the first may be in another thread, whose streams differ
        return Pools(arrays, slots)

    def _reserve(self, wanted: int) -> None:
        """Sees to it that `wanted` slots can be had: empty ones while the store may grow, then those of kept blocks."""
        empty = self.slots.free_slots - self.slots.idle_slots
        if wanted > empty:
            size = 1 << (self.slots.slots - empty + wanted - 1).bit_length()
            size = -(-size // self.block) * self.block
            size = size if self.limit is None else min(size, self.limit // self.block * self.block)
            if size > self.slots.slots:
                self.grow(size)
        if wanted > self.slots.free_slots:
            found = f"room for {self.slots.free_slots} more tokens of at most {self.limit}"
            do = "Give it more room, or ask for fewer new tokens."
            raise CacheError("a prompt cache", found, f"room for {wanted}, the prompts and their new tokens", do)

    def _end(self, sequences: Sequence[int | None]) -> None:
        for sequence in sequences:
            if sequence is not None:
                self.slots.free(sequence)
