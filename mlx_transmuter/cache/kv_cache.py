"""Store: the pools of a decoder's cache with the slots in them, which outlive a run where the caller keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.block_manager import BlockManager
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.pool_storage import write_rows
from mlx_transmuter.cache.pools import Pools
from mlx_transmuter.cache.quantized_pool import QuantizedFormat


class PoolSpec(NamedTuple):
    """What a slot holds in one pool: `heads` rows of `width` elements of a dtype; packed vectors, where so."""

    heads: int
    width: int
    dtype: mx.Dtype
    quantized_format: QuantizedFormat | None = None

    @property
    def slot_nbytes(self) -> int:
        """The bytes of a slot."""
        return self.heads * self.width * self.dtype.size


class KVCache:
    """Pools, one of each kind, and the Slots that say who owns which of their slots.

    Pool i is [heads · slots + 1, width]. A head's rows lie together, so that a sequence is read in one go: those of all
    slots, or of `run` slots after another head's (see CacheIndex.heads, whose block is `span`). The last row is spare:
    what padding would store goes there, and nothing reads it.

    A run's own store has the slots that its rows need. One that outlives its runs begins with none, grows by need up to
    `limit` slots (None: without end), and then gives up the kept blocks that were used least recently.
    """

    def __init__(
        self,
        pool_specs: Sequence[PoolSpec],
        num_slots: int,
        block_size: int = 1,
        max_slots: int | None = None,
        run_slots: int | None = None,
    ):
        self.pool_specs, self.block_size, self.max_slots, self.run_slots = (
            tuple(pool_specs),
            block_size,
            max_slots,
            run_slots,
        )
        self.copied_slots = 0
        self.in_use = False
        self.block_manager = BlockManager(num_slots, block_size)
        self.pools = self._empty_pools(num_slots)

    @property
    def head_span(self) -> int:
        """How many slots of a head lie together in the pools."""
        return self.run_slots or max(1, self.block_manager.num_slots)

    @property
    def slot_nbytes(self) -> int:
        """The bytes of one slot in all pools."""
        return sum(kind.slot_nbytes for kind in self.pool_specs)

    def open_sequences(
        self, prompts: Sequence[Sequence[int]], max_lengths: Sequence[int], *, equal_prefixes: bool = False
    ) -> tuple[list[int | None], list[int]]:
        """(sequences, stored): a sequence for each row that will hold total[r] > 0 tokens, and how many of its prompt's
        first tokens are in it already. alike: the rows with a prompt begin with equally many.

        One run at a time, which `leave` ends. Raises CacheError for a second one, and for rows that need more slots
        than the limit allows.
        """
        if self.in_use:
            do = "Finish the one before, or give each a cache of its own."
            raise CacheError("a prompt cache", "a run in it that isn't over", "one run at a time", do)
        opened = [self.block_manager.open(p) if size else None for p, size in zip(prompts, max_lengths, strict=True)]
        sequences = [None if row is None else row[0] for row in opened]
        if equal_prefixes:
            least = min((row[1] for row, p in zip(opened, prompts, strict=True) if row and p), default=0)
            opened = [row and (row[0], min(row[1], least)) for row in opened]
            for row in filter(None, opened):
                self.block_manager.truncate(*row)
        stored = [row[1] if row else 0 for row in opened]
        # A block of which a row has the beginning alone is copied when the row writes on.
        blocks = sum(
            -(-size // self.block_size) - n // self.block_size for n, size in zip(stored, max_lengths, strict=True)
        )
        try:
            self._ensure_free_slots(blocks * self.block_size)
        except BaseException:  # too many tokens, no memory, Ctrl-C
            self.close_sequences(sequences)
            raise
        self.in_use = True
        return sequences, stored

    def close_sequences(self, sequences: Sequence[int | None]) -> None:
        """Ends a run's sequences. What they kept stays, unless a step failed and took the pools with it."""
        self.in_use = False
        if self.pools.is_taken:
            self.clear()
        else:
            self._free_sequences(sequences)

    def clear(self) -> None:
        """Forgets everything, and gives the memory back."""
        self.block_manager = BlockManager(0, self.block_size)
        self.pools = self._empty_pools(0)

    def grow(self, num_slots: int) -> None:
        """From now on there are `slots` slots, not fewer than before. Each pool is copied once, one at a time."""
        assert self.run_slots is None, "the pools of a run's own rows are made whole"
        before = self.block_manager.num_slots
        self.block_manager.grow(num_slots)
        arrays = self.pools.take()
        for i, kind in enumerate(self.pool_specs):
            *heads, spare = mx.split(arrays[i], [(head + 1) * before for head in range(kind.heads)])
            more = mx.zeros((num_slots - before, kind.width), kind.dtype)
            arrays[i] = mx.concatenate([part for head in heads for part in (head, more)] + [spare])
            del heads, spare
            mx.eval(arrays[i])
        self.pools = Pools(arrays, num_slots)

    def append(self, sequence: int, count: int) -> None:
        """Gives slots to `count` more tokens of the sequence; a page that it shares and now writes is copied."""
        self._copy_slots(self.block_manager.append(sequence, count))

    def open_drafts(self, counts: Sequence[int]) -> list[int]:
        """A sequence for the guesses after each row, with slots for counts[r] of them."""
        drafts = [self.block_manager.open()[0] for _ in counts]
        for draft, count in zip(drafts, counts, strict=True):
            self.block_manager.append(draft, count)
        return drafts

    def accept_drafts(
        self, sequences: Sequence[int | None], drafts: Sequence[int], accepted: Sequence[Sequence[int]]
    ) -> None:
        """The guesses at the places kept[r] of drafts[r] become the next tokens of sequences[r]; the drafts end.

        In blocks of one token they stay in their slots. In larger blocks a token has its place by its position: there
        the kept ones are copied, which the step that stored them must have been evaluated for.
        """
        copies: list[tuple[int, int]] = []
        for sequence, draft, places in zip(sequences, drafts, accepted, strict=True):
            if sequence is None:
                self.block_manager.free(draft)
            elif self.block_size == 1:
                self.block_manager.accept_draft(sequence, draft, places)
            elif places:
                self.append(sequence, len(places))
                start, count = self.block_manager.length(sequence) - len(places), len(places)
                names = self.block_manager.table([draft], self.block_manager.length(draft))[0][list(places)]
                own = self.block_manager.table([sequence], count, ring=True)[0][np.arange(start, start + count) % count]
                copies += zip(names.tolist(), own.tolist(), strict=True)
        self._copy_slots(copies)
        if self.block_size > 1:
            self._free_sequences(
                [draft for sequence, draft in zip(sequences, drafts, strict=True) if sequence is not None]
            )

    def _copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies slots of all pools, (from, to)."""
        if not copies:
            return
        self.copied_slots += len(copies)
        heads = {kind.heads for kind in self.pool_specs}
        if len(heads) > 1:
            expected = "one number of heads where pages are copied"
            raise CacheError("a copy of slots", f"pools of {sorted(heads)} heads", expected, "Use blocks of 1.")
        for n in heads:  # none where a decoder has states alone
            old, new = (self.pool_rows(side, n) for side in zip(*copies, strict=True))
            self.pools.copy_rows(old, new)

    def write_slots(self, slots: np.ndarray, values: Sequence[mx.array]) -> None:
        """Writes values, one [slots, heads, width] for each pool, at these slots."""
        arrays = self.pools.take()
        for i, (kind, value) in enumerate(zip(self.pool_specs, values, strict=True)):
            at = mx.array(self.pool_rows(slots, kind.heads))
            arrays[i] = write_rows(arrays[i], at, value.swapaxes(0, 1).reshape(-1, kind.width), arrays[i].shape[0] - 1)
            mx.eval(arrays[i])
        self.pools = Pools(arrays, self.block_manager.num_slots)

    def pool_rows(self, slots: Sequence[int] | np.ndarray, heads: int) -> np.ndarray:
        """The rows of the slots in a pool of that many heads, int32 [heads · slots], the slots of one head together."""
        at, head = np.asarray(slots, np.int32), np.arange(heads, dtype=np.int32)[:, None]
        return ((at // self.head_span * heads + head) * self.head_span + at % self.head_span).reshape(-1)

    def _empty_pools(self, slots: int) -> Pools:
        arrays = [mx.zeros((kind.heads * slots + 1, kind.width), kind.dtype) for kind in self.pool_specs]
        if not slots:
            mx.eval(arrays)  # a store that outlives its runs: the first may be in another thread, whose streams differ
        return Pools(arrays, slots)

    def _ensure_free_slots(self, num_slots: int) -> None:
        """Sees to it that `wanted` slots can be had: empty ones while the store may grow, then those of kept blocks."""
        empty = self.block_manager.free_slots - self.block_manager.evictable_slots
        if num_slots > empty:
            size = 1 << (self.block_manager.num_slots - empty + num_slots - 1).bit_length()
            size = -(-size // self.block_size) * self.block_size
            size = size if self.max_slots is None else min(size, self.max_slots // self.block_size * self.block_size)
            if size > self.block_manager.num_slots:
                self.grow(size)
        if num_slots > self.block_manager.free_slots:
            found = f"room for {self.block_manager.free_slots} more tokens of at most {self.max_slots}"
            do = "Give it more room, or ask for fewer new tokens."
            raise CacheError("a prompt cache", found, f"room for {num_slots}, the prompts and their new tokens", do)

    def _free_sequences(self, sequences: Sequence[int | None]) -> None:
        for sequence in sequences:
            if sequence is not None:
                self.block_manager.free(sequence)
