"""CacheIndex: where the tokens of one call sit in a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlx_transmuter.cache import head_index
from mlx_transmuter.cache import visibility as see
from mlx_transmuter.cache.errors import (
    INT32_MAX,
    CacheError,
    as_bool,
    as_int32,
    check_every_sizes,
    check_integer,
    check_lengths,
    check_pairs,
)
from mlx_transmuter.cache.pool_storage import read_rows, view_runs, write_rows, zero_unseen
from mlx_transmuter.cache.structure import IndexSignature, fields_from_walk, walk_index


@dataclass(frozen=True, eq=False, repr=False)
class CacheIndex:
    """Where the tokens of one call sit in a cache: the position of each, and the slots that hold its sequence.

    A pool is one array [slots, ...] of any dtype; a slot is a row of it, and there is no batch axis. The tokens of a
    call are `batch` lanes of `seq`. A table, int32 [rows, context], names the slots of each sequence, and `row` the
    sequence of each lane. One run of slots per row, pages, a shared prefix, a forked beam, a tree of guesses and
    packed prompts are all values of this type; a layer calls `extend` on each of its pools and attends under
    `visible`, whatever the value.

    Build one with `make`, `rows`, `whole` or `packed`. Arguments are lists, numpy or MLX arrays; on the device all is
    int32. A wrong one raises CacheError, a ValueError. Nothing here looks at a value on the device: every method works
    on the tracers of mx.compile and gives there what it gives eagerly.

    The laws:

    1. Column is position. Column j of a sequence's row of the table is the slot of its position j; of a table of
       blocks of m positions, the slot of block j, which stands at its last position j·m + m - 1. Under a draft the
       call's tokens are columns too, after the table's, each at its token's position. The caller keeps a slot to one
       column of a row, lets sequences share a slot only at the same column after the same tokens, and frees a column
       once no token still to come can look back to it. In a ring columns come round again: see `ring`.
    2. -1 addresses nothing, and so does every number outside its range: as a position it is padding, in a table a
       column without a slot, as a lane's row a lane that is all padding. A store there is dropped and a read is zero.
       A column without a slot inside what a token sees is a hole: a zero row that the mask shows.
    3. A token stores at its own column, the one that stands at its position: in blocks, only a block's last token has
       one; under a draft, at the slot the draft names. Past the last column it stores nothing.
    4. The caller aims each store of a call at a slot of its own, and at none that another sequence's table names. Two
       stores at one slot leave there, element by element, one of the two.
    5. Padding stores nothing, sees nothing and is never seen.
    6. A column that no token of its lane sees reads as exact zero, whatever its slot holds, NaN and infinity included.
       Under a selection this holds for each chosen column. What is zeroed and what is masked follow from one window.
    7. Values vary, shapes do not: positions and tables are arrays, so one compiled step serves all of them.

    Six methods go beyond: `at` places other tokens in the same lanes, `narrow` reads only the first columns, `ring`
    only the last, `heads` addresses pools that keep heads apart, `twice` pools of both keys and values, and `keep`
    stores what a whole index sees. `store` and `read` are the two halves of `extend`.
    """

    kind: str  # "tabled", "whole" or "packed"
    token_positions: mx.array  # int32 [batch, seq]
    table: mx.array | None = None  # int32 [rows, context]
    table_row: mx.array | None = None  # int32 [batch]
    every_tables: tuple[tuple[int, mx.array], ...] = ()  # (m, int32 [rows, context_m])
    positions_per_column: int = 1
    window_size: int | None = None
    selected_columns: mx.array | None = None  # int32 [batch, seq, k]
    store_slots: mx.array | None = None  # int32 [batch, seq], of a draft, or of a whole index that keeps its tokens
    draft_mask: mx.array | None = None  # bool [batch, seq, seq], of a draft
    run_stride: int | None = None  # row r of the table is the run of slots from r · stride
    run_in_signature: bool = False  # ... and walk says so
    spare_row: int | None = None  # the row of the pool where what is stored nowhere goes
    is_ring: bool = False  # the columns come round again

    # Constructors

    @classmethod
    def make(cls, pos: Any, table: Any, row: Any = None, every: Iterable[tuple[int, Any]] = ()) -> CacheIndex:
        """Tokens at positions pos int32 [batch, seq] of sequences at the slots of table int32 [rows, context].

        row, int32 [batch], is the sequence of each lane; without it lane b is sequence b. Several lanes may name one
        sequence: its tokens see each other as in one lane. every has pairs (m, blocks) for layers that keep one entry
        per block of m positions: blocks, int32 [rows, context_m], names the slots of the blocks in those layers'
        pools.

        Raises CacheError for a wrong shape, an empty axis, an m below 2 or given twice.
        """
        pos = as_int32("CacheIndex.make: pos", pos, ["batch", "seq"])
        table = as_int32("CacheIndex.make: table", table, ["rows", "context"])
        if row is not None:
            row = as_int32("CacheIndex.make: row", row, [pos.shape[0]])
        elif table.shape[0] != pos.shape[0]:
            raise CacheError("CacheIndex.make: table", f"{table.shape[0]} rows", f"{pos.shape[0]}, one a lane, or row")
        named = check_pairs("CacheIndex.make: every", every)
        sizes = check_every_sizes("CacheIndex.make: every", [m for m, _ in named])
        shape = [table.shape[0], "context_m"]
        tables = [as_int32(f"CacheIndex.make: blocks of {m}", blocks, shape) for m, blocks in named]
        return cls("tabled", pos, table, row, tuple(zip(sizes, tables, strict=True)))

    @classmethod
    def rows(cls, context: int, lens: Any, every: Iterable[int] = ()) -> CacheIndex:
        """Row b owns the `context` slots from b · context and holds lens[b] tokens at positions 0 to lens[b] - 1.

        Lanes are padded on the left to the longest, so the last token is every lane's last; pad the ids the same way.
        The pools have len(lens) · context slots. For each m of every, row b also owns the run of c = ⌈context / m⌉
        block slots from b · c. Reads are slices of the pool, not gathers.

        Raises CacheError without a lane, for a context below 1, a length outside 0 to context, an m below 2 or twice.
        """
        context = check_integer("CacheIndex.rows: context", context, 1)
        lens = check_lengths("CacheIndex.rows: lens", lens, context)
        if not lens:
            raise CacheError("CacheIndex.rows: lens", "no lane", "one length a lane")
        if len(lens) * context > INT32_MAX:
            slots = f"{len(lens)} runs of {context} slots"
            raise CacheError("CacheIndex.rows: context", slots, f"at most {INT32_MAX} slots, which int32 can number")
        sizes = check_every_sizes("CacheIndex.rows: every", every)
        blocks = tuple((m, see.contiguous_table(len(lens), -(-context // m))) for m in sizes)
        pos = see.left_padded_positions([[n] for n in lens], max(1, *lens))
        return cls("tabled", pos, see.contiguous_table(len(lens), context), None, blocks, run_stride=context)

    @classmethod
    def whole(cls, batch: int, seq: int, lens: Any = None) -> CacheIndex:
        """Whole sequences at positions 0 to seq - 1: nothing is read and nothing kept, extend gives the pool back.

        With lens, lane b holds lens[b] tokens, padded on the left. Raises CacheError for a batch or seq below 1, or a
        length that doesn't fit.
        """
        batch = check_integer("CacheIndex.whole: batch", batch, 1)
        seq = check_integer("CacheIndex.whole: seq", seq, 1)
        lens = [seq] * batch if lens is None else check_lengths("CacheIndex.whole: lens", lens, seq)
        if len(lens) != batch:
            raise CacheError("CacheIndex.whole: lens", f"{len(lens)} lengths", f"{batch}, one a lane")
        return cls("whole", see.left_padded_positions([[n] for n in lens], seq))

    @classmethod
    def packed(cls, seq: int, lens: Any) -> CacheIndex:
        """The whole index of lanes of several sequences: lane b holds lens[b][0], then lens[b][1], ... tokens.

        Lanes are padded on the left to seq. A token sees those of its own sequence, at or before it, alone. Raises
        CacheError without a lane, for a seq below 1, a negative length, or a lane of more than seq tokens.
        """
        seq = check_integer("CacheIndex.packed: seq", seq, 1)
        if not hasattr(lens, "__iter__"):
            raise CacheError("CacheIndex.packed: lens", repr(lens), "the lengths of each lane's sequences")
        lanes = [check_lengths(f"CacheIndex.packed: lens[{b}]", lane, seq) for b, lane in enumerate(lens)]
        if not lanes:
            raise CacheError("CacheIndex.packed: lens", "no lane", "the lengths of each lane's sequences")
        for b, lane in enumerate(lanes):
            if sum(lane) > seq:
                raise CacheError(f"CacheIndex.packed: lens[{b}]", f"{sum(lane)} tokens", f"at most seq = {seq}")
        return cls("packed", see.left_padded_positions(lanes, seq))

    # Other readings of the same tokens

    def window(self, w: int) -> CacheIndex:
        """The index whose tokens see only the last w ≥ 1 positions up to their own, in place of the window it had."""
        return replace(self, window_size=check_integer("CacheIndex.window", w, 1))

    def select(self, columns: Any) -> CacheIndex:
        """The index whose tokens read only the columns they choose, int32 [batch, seq, k], in that order.

        extend's seen is then [batch, seq, k, ...] and mask [batch, seq, k]. A column the token doesn't see reads as
        zero and is masked; one without a slot reads as zero; one chosen twice is read twice. Stores don't change. On a
        whole index a column is a token of the lane, or under every a block. Replaces the selection it had. Raises
        CacheError for another shape, k = 0, or a draft.
        """
        if self.draft_mask is not None or self.is_ring:
            raise CacheError("CacheIndex.select", "a ring" if self.is_ring else "a draft", "an index without one")
        return replace(
            self, selected_columns=as_int32("CacheIndex.select: columns", columns, [self.batch, self.seq, "k"])
        )

    def draft(self, slots: Any, sees: Any) -> CacheIndex:
        """The index whose tokens are a draft to verify in one call, such as a tree of guesses.

        slots, int32 [batch, seq], is where each token stores (-1: nowhere), slots that no table names. sees, bool
        [batch, seq, seq], says which tokens of its lane each sees: in a tree, itself and its ancestors. The table holds
        each sequence up to the call, and the columns are the table's, then the tokens: extend's seen is what the table
        reads, then values. A token sees the table's columns before its lane's least position and the tokens that sees
        says, of both those at or before its position and inside the window. Afterwards the caller keeps a path by
        writing the slots of its tokens into the next call's table; the others are free, and nothing is copied.

        Replaces the draft it had. Raises CacheError for another shape, or an index that is whole, reads blocks or
        selects.
        """
        if self.kind != "tabled" or self.positions_per_column != 1 or self.selected_columns is not None:
            raise CacheError("CacheIndex.draft", repr(self), "an index over a table, without blocks or a selection")
        slots = as_int32("CacheIndex.draft: slots", slots, [self.batch, self.seq])
        return replace(
            self,
            store_slots=slots,
            draft_mask=as_bool("CacheIndex.draft: sees", sees, [self.batch, self.seq, self.seq]),
        )

    def store_at(self, slots: Any) -> CacheIndex:
        """The whole or packed index whose tokens are stored too, at slots int32 [batch, seq] (-1: nowhere).

        What is seen stays values, and extend's pool' has them at the slots. So prompts that begin, several in a lane,
        run once for all. Raises CacheError for another shape, or an index that is over a table or reads blocks.
        """
        if self.table is not None or self.positions_per_column != 1:
            raise CacheError("CacheIndex.keep", repr(self), "a whole or packed index, not in blocks")
        return replace(self, store_slots=as_int32("CacheIndex.keep: slots", slots, [self.batch, self.seq]))

    def every(self, m: int) -> CacheIndex:
        """The index read in blocks of m positions, for a layer that keeps one entry per block (law 1).

        extend stores the values of the tokens that close a block; a token sees a block from its last position on, and
        under a window only while that position is inside. The pools are those of the blocks' table. On a whole index
        the columns are the lane's ⌈seq / m⌉ blocks, seen the values of the tokens that close them, zero where none
        does. every(m) of an index in blocks of m is itself. Raises CacheError for an m below 1 and, unless it is that,
        for an index in blocks of another size, with a selection or a draft, packed, or without a table of blocks of m.
        """
        m = check_integer("CacheIndex.every", m, 1)
        if m == self.positions_per_column:
            return self
        if (
            self.positions_per_column != 1
            or self.selected_columns is not None
            or self.store_slots is not None
            or self.kind == "packed"
        ):
            raise CacheError(
                f"CacheIndex.every({m})", repr(self), "an index of positions, unpacked, no selection or draft"
            )
        if self.kind == "tabled" and m not in dict(self.every_tables):
            raise CacheError(
                "CacheIndex.every", m, f"one of the tables of blocks it has: {[m for m, _ in self.every_tables]}"
            )
        return replace(self, positions_per_column=m)

    def advance(self) -> CacheIndex:
        """The index of the next token of every lane: one past the lane's greatest position, padding at 0.

        Keeps window and every, drops selection and draft. Where two lanes name one sequence this isn't the sequence's
        next position: make the index there. Raises CacheError on a whole index.
        """
        if self.kind != "tabled":
            raise CacheError("CacheIndex.advance", repr(self), "an index over a table: a whole one keeps nothing")
        after = mx.maximum(self.effective_positions.max(axis=1, keepdims=True), -1) + 1
        return replace(self, token_positions=after, selected_columns=None, store_slots=None, draft_mask=None)

    def with_positions(self, pos: Any) -> CacheIndex:
        """The index of other tokens of these lanes, at positions pos int32 [batch, seq], without selection and draft.

        The constructors of runs place tokens by their number; a step that continues some of them places its own. Raises
        CacheError for another number of lanes, or on a whole index, whose tokens are its columns.
        """
        if self.table is None:
            raise CacheError("CacheIndex.at", repr(self), "an index over a table")
        pos = as_int32("CacheIndex.at: pos", pos, [self.batch, "seq"])
        return replace(self, token_positions=pos, selected_columns=None, store_slots=None, draft_mask=None)

    def limit_context(self, context: int) -> CacheIndex:
        """The index that reads only the first `context` columns; the caller promises that positions fit.

        A token past them stores nothing. Tables of blocks of m keep the ⌈context / m⌉ blocks those positions need. An
        index of `rows` keeps its runs and stays a slice of the pool, and `walk` says so: without a narrow, a rows
        index walks as any table of its shape and reads by gathers once it is rebuilt. Raises CacheError for a context
        outside 1 to the table's, or a whole index.
        """
        if self.table is None or self.is_ring:
            raise CacheError("CacheIndex.narrow", repr(self), "an index over a table, no ring")
        context = check_integer("CacheIndex.narrow", context, 1, self.table.shape[1])
        blocks = tuple((m, table[:, : -(-context // m)]) for m, table in self.every_tables)
        return replace(
            self, table=self.table[:, :context], every_tables=blocks, run_in_signature=self.run_stride is not None
        )

    def as_ring(self) -> CacheIndex:
        """The index whose columns come round again, for sequences longer than the table that attend through a window.

        Position p has column p mod context, and a column stands at the last position up to the lane's greatest (under
        a draft: before its least) that has it. So a table of as many columns as the window has positions, and one more
        for each further token of a call, holds all that is seen, however long the sequences: `mask` and what needs it
        raise CacheError without a window, or for a larger one. The lanes of one sequence count as one call. Positions
        aren't bounded. Raises CacheError for an index that is whole, has tables of blocks, or selects.
        """
        if self.table is None or self.every_tables or self.selected_columns is not None or self.run_in_signature:
            raise CacheError("CacheIndex.ring", repr(self), "an index over a table, whole, without blocks or selection")
        return replace(self, is_ring=True)

    def for_heads(self, num_heads: int, head_span: int) -> CacheIndex:
        """The index over pools [n · slots, dim] that keep n heads apart, its lanes the batch · n pairs (lane, head).

        Slots come in blocks of `block`, and in the pool a block of each head follows the other: head h of slot s is at
        (s // block · n + h) · block + s mod block. With block the number of slots that is h · slots + s. The pool's
        slots are whole blocks. extend takes values [batch · n, seq, dim], or [batch, n, seq, dim] as they are, and
        gives seen [batch · n, context, dim], which reshapes to [batch, n, context, dim] without a copy. An index of
        `rows` without tables of blocks stays a slice of the pool where block is its context before any narrow: then
        the pool is [batch, n, context, dim] as it lies. Raises CacheError for an n or a block below 1.
        """
        return head_index.index_for_heads(self, num_heads, head_span)

    def for_key_value_pool(self, value_offset: int) -> CacheIndex:
        """The index over pools that hold two such pools, the second one `apart` rows after the first, as keys and
        values of all heads: its lanes are those over the first, then those over the second.

        The first pool has exactly `apart` rows. extend takes values [2 · batch, seq, ...], and gives seen so. What was
        a slice of the pool stays one where the second pool follows the runs of the first at once. Raises CacheError for
        a negative apart, or an index with tables of blocks.
        """
        return head_index.index_for_key_value_pool(self, value_offset)

    def with_spare_row(self, pool_row: int) -> CacheIndex:
        """The index for pools whose row `row` nobody reads: what would be stored nowhere is stored there.

        A write is then one scatter; without a spare row it takes two, since MLX can't drop a store. No table may name
        the row. Raises CacheError for a negative row.
        """
        return replace(self, spare_row=check_integer("CacheIndex.spare", pool_row, 0, INT32_MAX))

    # The call's tokens

    @property
    def batch(self) -> int:
        """The number of lanes."""
        return self.token_positions.shape[0]

    @property
    def seq(self) -> int:
        """The number of tokens of each lane, padding included."""
        return self.token_positions.shape[1]

    @property
    def context(self) -> int:
        """The number of columns: the table's width (and seq under a draft), or a whole index's tokens or blocks."""
        if self.table is None:
            return -(-self.seq // self.positions_per_column)
        return self.batch_table.shape[1] + (0 if self.draft_mask is None else self.seq)

    def positions(self) -> mx.array:
        """The tokens' positions, int32 [batch, seq], padding 0, at most the last column of the positions' table.

        For rotating, and for indexing a table of position embeddings. The same whatever `every`.
        """
        if self.is_ring:
            return mx.maximum(self.effective_positions, 0)
        return mx.clip(
            self.effective_positions, 0, see.last_index(self.seq if self.table is None else self.table.shape[1])
        )

    # Pools

    def extend(self, values: Any, pool: Any, *, zero_unseen: bool = True) -> tuple[mx.array, mx.array]:
        """(seen, pool'): values [batch, seq, ...] stored in pool [slots, ...], and what the tokens attend over.

        pool' differs from pool in the slots the tokens address alone. It takes pool's memory, at the cost of the
        call's tokens, when nobody else holds pool at evaluation: let `Pools` own it, and give each pool to one extend
        a step. seen, [batch, context, ...], is read from pool', zero in the columns that no token of the lane sees or
        that have no slot; under a selection [batch, seq, k, ...]; under a draft the table's columns, then values. On a
        whole index pool' is pool and seen is values, or what every or select make of them. zero=False is as in read.
        Raises CacheError for values of another shape or dtype than the pool's.
        """
        values, pool = self._checked_arrays("CacheIndex.extend", values, pool)
        pool = self._write(values, pool)
        if self.table is not None and self.draft_mask is None:
            return self._read(pool, zero_unseen), pool
        values = values.reshape(self.batch, self.seq, *pool.shape[1:])
        if self.table is not None:
            return mx.concatenate([self._read(pool, zero_unseen), values], axis=1), pool
        if self.selected_columns is None and self.positions_per_column == 1:
            return values, pool
        return read_rows(
            values.reshape(self.batch * self.seq, *pool.shape[1:]), self.column_slots, self.read_mask
        ), pool

    def write(self, values: Any, pool: Any) -> mx.array:
        """The pool' of extend alone."""
        values, pool = self._checked_arrays("CacheIndex.store", values, pool)
        return self._write(values, pool)

    def read(self, pool: Any, *, zero_unseen: bool = True) -> mx.array:
        """The seen of extend alone, from a pool that store gave.

        With zero=False a column that no token sees may keep what its slot holds, or what the lane's first one does: a
        run of slots is then read by a view of the pool and nothing moves, and a table by a gather alone. That breaks
        law 6 and is for pools that never held NaN or infinity. Raises
        CacheError on a whole index and under a draft, whose columns are values that the pool doesn't hold.
        """
        if self.table is None or self.store_slots is not None:
            raise CacheError(
                "CacheIndex.read", repr(self), "an index over a table, without a draft", "Use extend here."
            )
        return self._read(pool if isinstance(pool, mx.array) else mx.array(pool), zero_unseen)

    def mask(self) -> mx.array:
        """Which columns of seen each token sees: bool [batch, seq, context], or [batch, seq, k] under a selection."""
        return self._mask

    def column_positions(self) -> mx.array:
        """The position at which each column stands, int32 [batch, context]: its own number, a block's last, or under a
        draft and on a whole index the position of the call's token that it is. Raises CacheError for a whole index in
        blocks, and under a selection."""
        if self.selected_columns is not None or (self.table is None and self.positions_per_column != 1):
            raise CacheError("CacheIndex.stands", repr(self), "an index without a selection, and of positions if whole")
        if self.table is None:
            return self.effective_positions
        own = mx.broadcast_to(see.table_column_positions(self), (self.batch, self.batch_table.shape[1]))
        return own if self.draft_mask is None else mx.concatenate([own, self.effective_positions], axis=1)

    def visible(self) -> mx.array:
        """mask for mx.fast.scaled_dot_product_attention: bool [batch, 1, seq, context], or k in place of context."""
        return self._mask[:, None]

    # Structure

    def walk(self) -> tuple[IndexSignature, list[mx.array]]:
        """(signature, leaves): what a compiled step depends on beside its shapes, hashable, and the arrays it takes.

        Two indices share a compiled step exactly when their signatures agree: the case (whole, packed, tabled), whether
        row is given, the sizes of blocks in order, every, the window, whether there are a selection and a draft, the
        run's stride of an index that `narrow` made from rows, the spare row, whether a whole index keeps its tokens,
        and whether columns come round. Leaves in order: row, positions, table, tables of blocks, columns, the draft's
        slots, its sees.
        """
        return walk_index(self)

    @classmethod
    def from_walk(cls, signature: IndexSignature, leaves: Sequence[mx.array]) -> CacheIndex:
        """The index of a walk, also over a step's tracers: from_walk(*index.walk()) is index."""
        return cls(**fields_from_walk(signature, leaves))

    def place(self, at: mx.Device | mx.Stream | mx.DeviceType) -> CacheIndex:
        """The index with its arrays made where `at` computes. MLX's memory is shared, so values need no move."""
        if not isinstance(at, (mx.Device, mx.Stream, mx.DeviceType)):
            raise CacheError("CacheIndex.place", repr(at), "an MLX device or stream")

        def move(array: mx.array | None) -> mx.array | None:
            return None if array is None else mx.contiguous(array, stream=at)

        names = ("token_positions", "table", "table_row", "selected_columns", "store_slots", "draft_mask")
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **moved, every_tables=tuple((m, move(table)) for m, table in self.every_tables))

    def __repr__(self) -> str:
        parts = [self.kind, f"batch={self.batch}", f"seq={self.seq}", f"context={self.context}"]
        parts += [f"every={self.positions_per_column}"] if self.positions_per_column != 1 else []
        parts += [f"window={self.window_size}"] if self.window_size is not None else []
        parts += [f"select={self.selected_columns.shape[2]}"] if self.selected_columns is not None else []
        parts += ["ring"] if self.is_ring else []
        parts += ["draft"] if self.draft_mask is not None else ["keep"] if self.store_slots is not None else []
        return f"CacheIndex({', '.join(parts)})"

    # What the layers of a step share: computed once per index, not once per pool

    effective_positions = cached_property(see.effective_positions)
    batch_table = cached_property(see.batch_table)
    _mask = cached_property(see.visible_columns)
    read_mask = cached_property(see.read_mask)
    slot_mapping = cached_property(see.slot_mapping)
    column_slots = cached_property(see.column_slots)
    safe_column_slots = cached_property(see.safe_column_slots)

    def _checked_arrays(self, where: str, values: Any, pool: Any) -> tuple[mx.array, mx.array]:
        values, pool = (x if isinstance(x, mx.array) else mx.array(x) for x in (values, pool))
        if pool.ndim == 0:
            raise CacheError(where, "a pool of shape []", "an axis of slots")
        wanted = (self.batch, self.seq, *pool.shape[1:])
        found = values.shape
        if values.ndim == pool.ndim + 2:  # lanes and heads apart
            found = (found[0] * found[1], *found[2:])
        if found != wanted or values.dtype != pool.dtype:
            found = f"values of shape {list(values.shape)} and {values.dtype}"
            raise CacheError(where, found, f"{list(wanted)} and {pool.dtype}, as index and pool have them")
        return values, pool

    def _write(self, values: mx.array, pool: mx.array) -> mx.array:
        if self.table is None and self.store_slots is None:
            return pool
        return write_rows(
            pool, self.slot_mapping, values.reshape(self.batch * self.seq, *pool.shape[1:]), self.spare_row
        )

    def _read(self, pool: mx.array, zero: bool = True) -> mx.array:
        stride = None if self.run_stride is None else -(-self.run_stride // self.positions_per_column)
        rows, context = self.batch_table.shape
        if stride is None or self.selected_columns is not None or pool.shape[0] < rows * stride:
            if zero or self.selected_columns is not None or pool.size == 0:
                return read_rows(pool, self.column_slots, self.read_mask)
            return mx.take(pool, mx.minimum(self.safe_column_slots, pool.shape[0] - 1), axis=0)
        seen = view_runs(pool, rows, stride, context)
        return zero_unseen(seen, self.read_mask) if zero else seen
