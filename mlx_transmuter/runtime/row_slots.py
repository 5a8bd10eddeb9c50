"""RowSlots: which slots of a KVCache hold the tokens of a session's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_transmuter.cache import KVCache, PoolSpec
from mlx_transmuter.cache.layout import ceil_div, contiguous_table_of_lengths
from mlx_transmuter.runtime.buckets import Ring, power_of_two_bucket


class RowSlots:
    """The slots of a session's rows, and those of the draft that is being verified.

    paged: rows have blocks of slots, so that they can fork; else each row has contiguous slots. ring: the slots that a
    row keeps, however long it gets; None where rows keep all tokens. is_shared: whether the cache outlives the session,
    and with it the tokens before the window.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        sequences: Sequence[int | None],
        ring: Ring | None,
        *,
        paged: bool,
        is_shared: bool = False,
    ):
        self.kv_cache, self.ring, self.paged, self.is_shared = kv_cache, ring, paged, is_shared
        self._sequences = list(sequences)
        self._draft_sequences: list[int] | None = None
        self._peak_lengths = np.zeros(len(sequences), np.int32)

    @staticmethod
    def allocate(
        pool_specs: Sequence[PoolSpec],
        max_lengths: Sequence[int],
        ring: Ring | None,
        block_size: int | None,
        forked_lengths: Sequence[int] = (),
    ) -> RowSlots:
        """Returns the slots of rows in a cache of their own, in blocks of block_size slots; None: contiguous.

        max_lengths: for how many tokens of each row there are slots at once; for more the pools grow. The cache has one
        of a few sizes, so that sessions share steps: one is compiled for the size of its pools.
        forked_lengths: see Decoder.begin_session.
        """
        if block_size is None:
            stride = ring.slots if ring else power_of_two_bucket(int(max(max_lengths)))
            kv_cache = KVCache(pool_specs, len(max_lengths) * stride, stride, contiguous_stride=stride)
        else:
            blocks = most_blocks_of_rows(max_lengths, forked_lengths or [0] * len(max_lengths), ring, block_size)
            slots = blocks * block_size
            # Rows that keep a ring without sharing their prompts have one of a few sizes already.
            slots = max(1, slots) if ring and not any(forked_lengths) else power_of_two_bucket(slots)
            kv_cache = KVCache(pool_specs, ceil_div(slots, block_size) * block_size, block_size)
        sequences = [kv_cache.block_manager.open()[0] if length else None for length in max_lengths]
        return RowSlots(kv_cache, sequences, ring, paged=block_size is not None)

    @property
    def has_draft(self) -> bool:
        """Whether a draft is being verified."""
        return self._draft_sequences is not None

    def table(self, lengths: np.ndarray, width: int, *, ring: bool = False) -> np.ndarray:
        """Returns the slot table int32 [rows, width] of the first positions of rows of lengths int32 [rows] tokens: it
        maps positions to slots, not to blocks.

        ring: of the last positions, each at its column of a ring. -1 where a row has no token.
        """
        if self.paged:
            return self.kv_cache.block_manager.table(self._sequences, width, ring=ring)
        return contiguous_table_of_lengths(lengths, width, self.kv_cache.head_span, ring=ring)

    def reserve(
        self, counts: np.ndarray, draft_counts: Sequence[int] = (), restart_lengths: np.ndarray | None = None
    ) -> None:
        """Makes sure that there are slots for counts[r] more tokens of each row, and for drafts of draft_counts.

        restart_lengths: int32 [rows], how many tokens a row that restarts will have again before those; 0 for others.
        Raises CacheFullError, and changes nothing, where a cache that outlives the session has too few.
        """
        if not self.paged:
            return
        again = np.zeros_like(counts) if restart_lengths is None else restart_lengths
        row_counts = list(zip(self._sequences, counts.tolist(), again.tolist(), strict=True))
        appends = {row: count for row, count, length in row_counts if row is not None and count and not length}
        lengths = {row: length + count for row, count, length in row_counts if row is not None and length}
        restarts = {row: self._max_slots(length) for row, length in lengths.items()}
        self.kv_cache.reserve(list(appends), list(appends.values()), draft_counts, restarts)

    def _max_slots(self, length: int) -> int:
        """Returns the most tokens with slots of a row that gets to `length` tokens in steps."""
        is_dropped = self.ring is not None and not self.is_shared
        return min(length, self.ring.slots + self.kv_cache.block_size) if is_dropped and self.ring else length

    def append(self, counts: np.ndarray, lengths: np.ndarray) -> None:
        """Gives slots to counts[r] more tokens of each row, which then has lengths[r]. The pools may grow."""
        self._peak_lengths = np.maximum(self._peak_lengths, lengths)
        if not self.paged and self.ring is None and int(lengths.max()) > self.kv_cache.head_span:
            self.kv_cache.grow_rows(power_of_two_bucket(int(lengths.max())))
        if self.paged:
            for sequence, count in zip(self._sequences, counts.tolist(), strict=True):
                if count:
                    assert sequence is not None
                    self.kv_cache.append(sequence, count)

    def free_unreachable(self, lengths: np.ndarray) -> None:
        """Frees the slots of tokens that no window reaches any more, unless the cache keeps them for later sessions."""
        if self.ring is None or not self.paged or self.is_shared:
            return
        for sequence, length in zip(self._sequences, lengths.tolist(), strict=True):
            if sequence is not None:  # keeps one extra slot: hidden ring columns read the newest slot
                self.kv_cache.block_manager.free_before(sequence, max(0, length - self.ring.window))

    def first_positions(self) -> np.ndarray:
        """Returns the first position int32 [rows] of each row that still has its slot."""
        if not self.paged:
            return np.maximum(0, self._peak_lengths - self.kv_cache.head_span)
        manager = self.kv_cache.block_manager
        return np.array([0 if row is None else manager.first_position(row) for row in self._sequences], np.int32)

    def open_draft(self, counts: Sequence[int], width: int) -> np.ndarray:
        """Returns slots int32 [rows, width] for counts[r] draft tokens after each row, -1 for padding."""
        self._draft_sequences = self.kv_cache.open_drafts(counts)
        return self.kv_cache.block_manager.table(self._draft_sequences, width)

    def accept_draft(self, accepted: Sequence[Sequence[int]]) -> None:
        """Makes the draft tokens accepted[r] the next tokens of row r, and ends the draft."""
        assert self._draft_sequences is not None
        self.kv_cache.accept_drafts(self._sequences, self._draft_sequences, accepted)
        self._draft_sequences = None

    def truncate(self, lengths: np.ndarray) -> None:
        """Drops the tokens of each row after its first lengths[r].

        In contiguous slots the next tokens are written over them; until then no position sees them.
        """
        for sequence, length in zip(self._sequences, lengths.tolist(), strict=True):
            if self.paged and sequence is not None:
                self.kv_cache.block_manager.truncate(sequence, length)

    def fork(self, parents: Sequence[int]) -> None:
        """Makes row r share the slots of row parents[r]; nothing is copied until a row writes into a shared block.

        The first row that follows a parent takes its sequence over, so most rows only change places.
        """
        manager, free, sequences = self.kv_cache.block_manager, list(self._sequences), []
        for parent in parents:
            sequence, free[parent] = free[parent], None
            shared = self._sequences[parent]
            sequences.append(manager.fork(shared) if sequence is None and shared is not None else sequence)
        for sequence in free:
            if sequence is not None:
                manager.free(sequence)
        self._sequences = sequences

    def restart(self, rows: np.ndarray) -> None:
        """Drops all tokens of the rows, bool [rows], of which some may have lost their slots."""
        self._peak_lengths[rows] = 0
        manager = self.kv_cache.block_manager
        for row in np.flatnonzero(rows).tolist():
            sequence = self._sequences[row]
            if self.paged and sequence is not None:
                manager.free(sequence)
                self._sequences[row], _ = manager.open()

    def store_prefixes(
        self, row_tokens: Sequence[Sequence[int] | None], lengths: np.ndarray, roots: np.ndarray
    ) -> None:
        """Leaves the slots of each row's first lengths[r] tokens for later prompts of the root roots[r] (see
        empty_prefix) that begin with them.
        """
        row_values = zip(self._sequences, row_tokens, lengths.tolist(), roots.tolist(), strict=True)
        for sequence, tokens, length, root in row_values:
            if sequence is not None and tokens is not None:
                self.kv_cache.block_manager.store_prefix(sequence, tokens[:length], root)

    def free_rows(self, rows: Sequence[int]) -> None:
        """Ends rows before the session: what is stored of them may be evicted, and their other slots are free."""
        for row in rows:
            sequence, self._sequences[row] = self._sequences[row], None
            if sequence is not None:
                self.kv_cache.block_manager.free(sequence)

    def close(self) -> None:
        """Ends the rows. Gives the pools' memory back, unless they outlive the session."""
        sequences, self._sequences = [*self._sequences, *(self._draft_sequences or ())], []
        if not self.is_shared:
            self.kv_cache.pools.drop()
        elif sequences:  # of a session that is closed already, the cache may be another's
            self.kv_cache.close_sequences(sequences)


def most_blocks_of_rows(
    max_lengths: Sequence[int], forked_lengths: Sequence[int], ring: Ring | None, block_size: int
) -> int:
    """Returns the most blocks that rows of up to max_lengths[r] tokens have at a time.

    The first forked_lengths[r] tokens of a row are another row's, and the blocks that they fill are counted there. The
    slots of a ring may be those of other tokens than the other row still has: that row may count for both.
    """
    kept = [int(length) if ring is None else min(int(length), ring.slots + block_size) for length in max_lengths]
    alone = sum(ceil_div(length, block_size) for length in kept)
    shared = 0
    for most, length, forked in zip(kept, max_lengths, forked_lengths, strict=True):
        new_blocks = ceil_div(int(length), block_size) - int(forked) // block_size
        shared += min(new_blocks, ceil_div(most, block_size) * (1 if forked else 2))
    return min(alone, shared)
