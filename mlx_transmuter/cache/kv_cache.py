"""KVCache: the pools of a decoder and the block manager of their slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_transmuter.cache.block_manager import BlockManager
from mlx_transmuter.cache.errors import CacheError, CacheFullError
from mlx_transmuter.cache.layout import ceil_div, pool_rows, pool_size, spare_pool_row
from mlx_transmuter.cache.pools import Pools, write_pool_rows
from mlx_transmuter.cache.quantized_pool import QuantizedFormat, QuantizedPool

# A growing cache begins with so many slots, or with those of so many bytes where that is fewer.
FIRST_SLOTS = 4096
FIRST_NBYTES = 2**27
# It has four times as many from one growth to the next up to this size, and then twice as many.
FAST_GROWTH_NBYTES = 2**29


class PoolSpec(NamedTuple):
    """What a slot holds in one pool: `heads` vectors of `width` elements of a dtype, or quantized vectors as words."""

    heads: int
    width: int
    dtype: mx.Dtype
    quantized_format: QuantizedFormat | None = None

    @property
    def slot_nbytes(self) -> int:
        """The bytes of a slot."""
        return self.heads * self.width * self.dtype.size

    @staticmethod
    def for_vectors(heads: int, dim: int, dtype: mx.Dtype, bits: int | None = None, group_size: int = 64) -> PoolSpec:
        """The spec of a pool of `heads` vectors of dim elements of a dtype a slot; with bits, quantized to so many bits
        an element. Raises CacheError for other bits or groups than QuantizedFormat takes.
        """
        if bits is None:
            return PoolSpec(heads, dim, dtype)
        quantized_format = QuantizedFormat.choose(bits, group_size, dim, dtype)
        return PoolSpec(heads, quantized_format.width, mx.uint32, quantized_format)

    def as_pool(self, array: mx.array) -> mx.array | QuantizedPool:
        """The pool's array as a layer takes it, which stores and reads vectors."""
        return QuantizedPool(array, self.quantized_format) if self.quantized_format else array

    def encode(self, vectors: mx.array) -> mx.array:
        """Vectors [..., dim] as rows of the pool, [..., width]."""
        return self.quantized_format.quantize(vectors) if self.quantized_format else vectors.astype(self.dtype)

    def decode(self, pool_rows: mx.array) -> mx.array:
        """Rows of the pool [..., width] as vectors, [..., dim]."""
        return self.quantized_format.dequantize(pool_rows) if self.quantized_format else pool_rows


class KVCache:
    """Pools, one for each PoolSpec, and the BlockManager that says which sequence owns which of their slots.

    Pool i is [heads · slots + 1, width]. The vectors of a head lie together, so that a sequence is read at once: those
    of all slots, or of contiguous_stride slots after another head's (see CacheIndex.for_heads, whose head_span is the
    same). The last row is spare: padding is written there, and nothing reads it.

    The cache of one session has the slots that its rows may need. A prompt cache, which outlives its sessions, begins
    with none, grows when rows need slots, up to max_slots (None: without a limit), and then evicts the least recently
    used blocks. Its sizes are few, for a step is compiled for the size of the pools.
    """

    def __init__(
        self,
        pool_specs: Sequence[PoolSpec],
        num_slots: int,
        block_size: int = 1,
        max_slots: int | None = None,
        contiguous_stride: int | None = None,
    ):
        self.pool_specs = tuple(pool_specs)
        self.block_size, self.max_slots, self.contiguous_stride = block_size, max_slots, contiguous_stride
        self.copied_slots = 0
        self._use_lock = threading.Lock()  # locked from the beginning of a use to its end, in any thread
        self.block_manager = BlockManager(num_slots, block_size)
        self.pools = self._empty_pools(num_slots)

    @property
    def head_span(self) -> int:
        """The number of slots of a head that lie together in the pools."""
        return self.contiguous_stride or max(1, self.block_manager.num_slots)

    @property
    def slot_nbytes(self) -> int:
        """The bytes of one slot in all pools."""
        return sum(spec.slot_nbytes for spec in self.pool_specs)

    # Use, by one session at a time or by what reads or changes all that is stored

    @property
    def in_use(self) -> bool:
        """Whether a session, or a `use_alone`, is not over."""
        return self._use_lock.locked()

    @contextmanager
    def use_alone(self) -> Iterator[None]:
        """Keeps sessions of all threads away. Raises CacheError where one is open."""
        self._begin_use()
        try:
            yield
        finally:
            self._use_lock.release()

    def _begin_use(self) -> None:
        if not self._use_lock.acquire(blocking=False):
            do = "Finish the session before, or give each session a cache of its own."
            raise CacheError("a prompt cache", "a session that is not over", "one session at a time", do)

    # Sequences

    def open_sequences(
        self,
        prompts: Sequence[Sequence[int]],
        max_lengths: Sequence[int],
        *,
        equal_prefixes: bool = False,
        roots: Sequence[int] | None = None,
    ) -> tuple[list[int | None], list[int]]:
        """Returns (sequences, stored): a sequence for each row that will have max_lengths[r] > 0 tokens, None for other
        rows, and the number of first tokens of its prompt whose keys and values are stored.

        The cache then has room for the prompts; what comes after them gets its slots by `reserve`. equal_prefixes: all
        rows with a prompt begin with equally many stored tokens. roots: of each row's prefix (see empty_prefix), by
        default 0. One session at a time, which `close_sequences` ends. Raises CacheError for a second one,
        CacheFullError for prompts that need more slots than max_slots allows.
        """
        self._begin_use()
        sequences: list[int | None] = [None] * len(prompts)
        stored = [0] * len(prompts)
        try:
            for row, (prompt, max_length) in enumerate(zip(prompts, max_lengths, strict=True)):
                if max_length:
                    sequences[row], stored[row] = self.block_manager.open(prompt, roots[row] if roots else 0)
            if equal_prefixes:
                stored = self._equalize_prefixes(prompts, sequences, stored)
            unstored = {
                sequence: max(0, len(prompt) - count)
                for sequence, prompt, count in zip(sequences, prompts, stored, strict=True)
                if sequence is not None
            }
            self.reserve(list(unstored), list(unstored.values()))
        except BaseException:  # too many tokens, no memory, Ctrl-C
            self.close_sequences(sequences)
            raise
        return sequences, stored

    def close_sequences(self, sequences: Sequence[int | None]) -> None:
        """Ends a session's sequences. Stored prefixes stay, unless a step failed and took the pools with it."""
        try:
            if self.pools.is_taken:
                self.clear()
            else:
                self._free_sequences(sequences)
        finally:
            self._use_lock.release()

    def reserve(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],
        draft_counts: Sequence[int] = (),
        restarts: Mapping[int, int] | None = None,
    ) -> None:
        """Makes sure that `append` finds slots for counts[r] more tokens of each of these sequences, and `open_drafts`
        for drafts of draft_counts: the cache grows, or evicts.

        restarts: other sequences, which are freed first, and how many tokens a new one has in the place of each. Raises
        CacheFullError, and changes nothing, where max_slots is too few.
        """
        new_lengths = [*draft_counts, *(restarts or {}).values()]
        new_slots = sum(ceil_div(length, self.block_size) for length in new_lengths) * self.block_size
        new_slots -= self.block_manager.slots_to_free(list(restarts or {}))
        self._ensure_free_slots(max(0, new_slots + self.block_manager.slots_to_append(sequences, counts)))

    def append(self, sequence: int, count: int) -> None:
        """Gives slots to `count` more tokens of the sequence; a shared block that it now writes to is copied."""
        self._copy_slots(self.block_manager.append(sequence, count))

    def open_drafts(self, counts: Sequence[int]) -> list[int]:
        """Returns a sequence for the draft of each row, with slots for its counts[r] tokens."""
        drafts = [self.block_manager.open()[0] for _ in counts]
        for draft, count in zip(drafts, counts, strict=True):
            self.block_manager.append(draft, count)
        return drafts

    def accept_drafts(
        self, sequences: Sequence[int | None], drafts: Sequence[int], accepted: Sequence[Sequence[int]]
    ) -> None:
        """Ends the drafts; the tokens at the positions accepted[r] of drafts[r] become the next tokens of sequences[r].

        In blocks of one slot they stay in their slots. In larger blocks a position fixes a token's slot: the accepted
        tokens are copied, so the step that stored them must have been evaluated.
        """
        if self.block_size == 1:
            self._accept_in_place(sequences, drafts, accepted)
        else:
            self._accept_by_copy(sequences, drafts, accepted)

    # Slots

    def read_slots(self, slots: Sequence[int] | np.ndarray) -> list[mx.array]:
        """Returns what the slots hold in each pool, [slots, heads, width]. Evaluate it before the next step."""
        values = []
        for spec, pool in zip(self.pool_specs, self.pools.arrays, strict=True):
            pool_rows = mx.take(pool, mx.array(self.pool_rows(slots, spec.heads)), axis=0)
            values.append(pool_rows.reshape(spec.heads, len(slots), spec.width).swapaxes(0, 1))
        return values

    def write_slots(self, slots: Sequence[int] | np.ndarray, values: Sequence[mx.array]) -> None:
        """Writes values, [slots, heads, width] for each pool, at these slots."""
        arrays = self.pools.take()
        for i, (spec, value) in enumerate(zip(self.pool_specs, values, strict=True)):
            pool_rows = mx.array(self.pool_rows(slots, spec.heads))
            flat_value = value.swapaxes(0, 1).reshape(-1, spec.width)
            arrays[i] = write_pool_rows(arrays[i], pool_rows, flat_value, spare_pool_row(arrays[i].shape[0]))
            mx.eval(arrays[i])
        self.pools = Pools(arrays)

    def pool_rows(self, slots: Sequence[int] | np.ndarray, heads: int) -> np.ndarray:
        """The rows of the slots in a pool of that many heads, int32 [heads · slots], by head and then by slot."""
        head = np.arange(heads, dtype=np.int32)[:, None]
        return pool_rows(np.asarray(slots, np.int32), head, heads, self.head_span).reshape(-1)

    # Pools

    def clear(self) -> None:
        """Removes everything that is stored and releases the memory."""
        self.block_manager = BlockManager(0, self.block_size)
        self.pools = self._empty_pools(0)

    def grow(self, num_slots: int) -> None:
        """Sets the number of slots, not below the present one. Copies each pool once, one at a time."""
        assert self.contiguous_stride is None, "contiguous rows grow by grow_rows"
        before = self.block_manager.num_slots
        self.block_manager.grow(num_slots)
        self._lengthen_spans(1, before, num_slots)

    def grow_rows(self, contiguous_stride: int) -> None:
        """Gives each contiguous row contiguous_stride slots, not fewer than it has. Copies each pool once, one at a
        time."""
        assert self.contiguous_stride is not None
        before, rows = self.contiguous_stride, self.block_manager.num_slots // self.contiguous_stride
        self.block_size = self.contiguous_stride = contiguous_stride
        self.block_manager = BlockManager(rows * contiguous_stride, contiguous_stride)  # it gave no slots to sequences
        self._lengthen_spans(rows, before, contiguous_stride)

    def _lengthen_spans(self, spans: int, before: int, after: int) -> None:
        """Makes room for `after` slots in place of `before` in each span of slots of each head."""
        arrays = self.pools.take()
        for i, spec in enumerate(self.pool_specs):
            *parts, spare = mx.split(arrays[i], [(part + 1) * before for part in range(spec.heads * spans)])
            new_slots = mx.zeros((after - before, spec.width), spec.dtype)
            arrays[i] = mx.concatenate([piece for part in parts for piece in (part, new_slots)] + [spare])
            del parts, spare
            mx.eval(arrays[i])
        self.pools = Pools(arrays)

    def _empty_pools(self, num_slots: int) -> Pools:
        shapes = [(pool_size(num_slots, spec.heads), spec.width) for spec in self.pool_specs]
        arrays = [mx.zeros(shape, spec.dtype) for shape, spec in zip(shapes, self.pool_specs, strict=True)]
        if not num_slots:
            mx.eval(arrays)  # of a prompt cache: its first session may be in another thread, whose streams differ
        return Pools(arrays)

    def _equalize_prefixes(
        self, prompts: Sequence[Sequence[int]], sequences: Sequence[int | None], stored: Sequence[int]
    ) -> list[int]:
        """Truncates the sequences to the shortest stored prefix of a prompt; returns the stored lengths."""
        opened = [(row, sequence) for row, sequence in enumerate(sequences) if sequence is not None]
        shortest = min((stored[row] for row, _ in opened if prompts[row]), default=0)
        lengths = list(stored)
        for row, sequence in opened:
            lengths[row] = min(stored[row], shortest)
            self.block_manager.truncate(sequence, lengths[row])
        return lengths

    def _ensure_free_slots(self, num_slots: int) -> None:
        """Makes num_slots slots available: empty ones while the cache may grow, then those of evictable blocks."""
        manager = self.block_manager
        if self._slot_limit is not None:
            available = self._slot_limit - (manager.num_slots - manager.free_slots)
            if num_slots > available:
                found = f"room for {available} more tokens of at most {self.max_slots}"
                expected = f"room for {num_slots}, those of the prompts and texts that are running"
                do = "Raise its limit (max_tokens, max_bytes), or ask for fewer prompts at once or fewer new tokens"
                raise CacheFullError("a prompt cache", found, expected, do)
        size = self._grown_size(num_slots + manager.num_slots - manager.free_slots + manager.evictable_slots)
        if size > manager.num_slots:
            self.grow(size)

    @property
    def _slot_limit(self) -> int | None:
        """The most slots, in whole blocks."""
        return None if self.max_slots is None else self.max_slots // self.block_size * self.block_size

    def _grown_size(self, num_slots: int) -> int:
        """The size at which the cache has num_slots slots, or the limit where that is fewer."""
        if num_slots <= self.block_manager.num_slots:
            return self.block_manager.num_slots
        slot_nbytes = max(1, self.slot_nbytes)
        size = min(FIRST_SLOTS, 1 << (max(1, FIRST_NBYTES // slot_nbytes).bit_length() - 1))
        while size < num_slots:
            size *= 4 if 4 * size * slot_nbytes <= FAST_GROWTH_NBYTES else 2
        size = ceil_div(size, self.block_size) * self.block_size
        return size if self._slot_limit is None else min(size, self._slot_limit)

    def _free_sequences(self, sequences: Sequence[int | None]) -> None:
        for sequence in sequences:
            if sequence is not None:
                self.block_manager.free(sequence)

    def _accept_in_place(
        self, sequences: Sequence[int | None], drafts: Sequence[int], accepted: Sequence[Sequence[int]]
    ) -> None:
        for sequence, draft, positions in zip(sequences, drafts, accepted, strict=True):
            if sequence is None:
                self.block_manager.free(draft)
            else:
                self.block_manager.accept_draft(sequence, draft, positions)

    def _accept_by_copy(
        self, sequences: Sequence[int | None], drafts: Sequence[int], accepted: Sequence[Sequence[int]]
    ) -> None:
        copies: list[tuple[int, int]] = []
        for sequence, draft, positions in zip(sequences, drafts, accepted, strict=True):
            if sequence is None:
                self.block_manager.free(draft)
            elif positions:
                first = self.block_manager.length(sequence)
                self.append(sequence, len(positions))
                sources = self.block_manager.slots_of(draft, 0, self.block_manager.length(draft))[list(positions)]
                targets = self.block_manager.slots_of(sequence, first, first + len(positions))
                copies += zip(sources.tolist(), targets.tolist(), strict=True)
        self._copy_slots(copies)
        pairs = zip(sequences, drafts, strict=True)
        self._free_sequences([draft for sequence, draft in pairs if sequence is not None])

    def _copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies slots of all pools, (from, to)."""
        if not copies:
            return
        self.copied_slots += len(copies)
        head_counts = {spec.heads for spec in self.pool_specs}
        if len(head_counts) > 1:
            expected = "one number of heads where blocks are copied"
            raise CacheError("a copy of slots", f"pools of {sorted(head_counts)} heads", expected, "Use blocks of 1.")
        for heads in head_counts:  # none where a decoder has states only
            sources, targets = (self.pool_rows(slots, heads) for slots in zip(*copies, strict=True))
            self.pools.copy_pool_rows(sources, targets)
