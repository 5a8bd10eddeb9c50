"""CacheIndex: the position of each token of a call, and the slots of the sequences in a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlx_transmuter.cache import head_index, slot_mapping, visibility
from mlx_transmuter.cache.arguments import (
    as_bool,
    as_int32,
    check_every_sizes,
    check_integer,
    check_lengths,
    check_packed_lengths,
    check_pairs,
)
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import INT32_MAX, ceil_div, contiguous_table, last_index, left_padded_positions
from mlx_transmuter.cache.pools import read_pool_rows, view_contiguous, write_pool_rows, zero_masked

IndexSignature = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, eq=False, repr=False)
class CacheIndex:
    """The position of each token of one call, and the slots of the sequences that the tokens belong to.

    A pool is one array [slots, ...] of any dtype; a slot is a row of it, and there is no batch axis. The tokens of a
    call are `batch` rows of `seq`. A table, int32 [rows, context], maps the positions of each sequence to slots, and
    `row` names the sequence of each batch row. (A block table in vLLM's terms maps them to blocks; here to slots.)
    Contiguous slots per row, blocks of slots, a shared prefix, a forked beam, a draft tree and a packed prefill are all
    values of this type; a layer calls `extend` on each of its pools and attends under `visible`, whatever the value.

    Build one with `make`, `rows`, `whole` or `packed`. Arguments are lists, numpy or MLX arrays; on the device all are
    int32. A wrong one raises CacheError, a ValueError. No method looks at a value on the device: each works on the
    tracers of mx.compile and returns there what it returns eagerly.

    The laws:

    1. Column is position. Column j of a sequence's row of the table is the slot of its position j; of a table of
       entries of m positions, the slot of entry j, which is at its last position j·m + m - 1. Under a draft the
       call's tokens are columns too, after the table's, each at its token's position. The caller gives a slot to one
       column of a row, lets sequences share a slot only at the same column after the same tokens, and frees a column
       once no later token can attend to it. In a ring columns are used again: see `as_ring`.
    2. -1 addresses nothing, and so does every number outside its range: as a position it is padding, in a table a
       column without a slot, as the sequence of a batch row a row of padding. A write there is dropped and a read is
       zero. A column without a slot among those a token attends to is a hole: a zero row that the mask shows.
    3. A token is written at its own column, the one at its position: in entries of m positions, only an entry's last
       token has one; under a draft, at the slot the draft names. Past the last column nothing is written.
    4. The caller aims each write of a call at a slot of its own, and at none that another sequence's table names. Two
       writes at one slot leave there, element by element, one of the two.
    5. Padding writes nothing, attends to nothing, and no token attends to it.
    6. A column that no token of its batch row attends to reads as exact zero, whatever its slot holds, NaN and infinity
       included. Under a selection this holds for each selected column. The zeroing and the mask follow one window.
    7. Values vary, shapes do not: positions and tables are arrays, so one compiled step serves all of them.

    Beyond the specification of cache indices: `with_positions` places other tokens in the same batch rows,
    `limit_context` reads only the first columns, `as_ring` only the last, `for_heads` addresses pools that keep heads
    apart, `for_key_value_pool` pools of both keys and values, and `write_at` writes the tokens of a whole index.
    `write` and `read` are the two halves of `extend`.
    """

    kind: str  # "tabled", "whole" or "packed"
    token_positions: mx.array  # int32 [batch, seq]
    table: mx.array | None = None  # int32 [rows, context]
    table_row: mx.array | None = None  # int32 [batch]
    entry_tables: tuple[tuple[int, mx.array], ...] = ()  # (m, int32 [rows, context_m])
    positions_per_entry: int = 1
    window_size: int | None = None
    selected_columns: mx.array | None = None  # int32 [batch, seq, k]
    write_slots: mx.array | None = None  # int32 [batch, seq], of a draft, or of a whole index that writes its tokens
    ancestor_mask: mx.array | None = None  # bool [batch, seq, seq], of a draft
    contiguous_stride: int | None = None  # row r of the table has the slots from r · contiguous_stride on, one by one
    stride_in_signature: bool = False  # whether walk reports contiguous_stride
    spare_pool_row: int | None = None  # the row of the pool where dropped values are written
    is_ring: bool = False  # whether columns are used again

    # Constructors

    @classmethod
    def make(cls, pos: Any, table: Any, row: Any = None, every: Iterable[tuple[int, Any]] = ()) -> CacheIndex:
        """Tokens at positions pos int32 [batch, seq] of sequences in the slots of table int32 [rows, context].

        row, int32 [batch], is the sequence of each batch row; without it batch row b is sequence b. Several batch rows
        may name one sequence: its tokens attend to each other as in one row. every has pairs (m, slots) for layers
        whose pools have one entry per m positions: slots, int32 [rows, context_m], has the slots of the entries in
        those pools.

        Raises CacheError for a wrong shape, an empty axis, an m below 2 or twice.
        """
        pos = as_int32("CacheIndex.make: pos", pos, ["batch", "seq"])
        table = as_int32("CacheIndex.make: table", table, ["rows", "context"])
        if row is not None:
            row = as_int32("CacheIndex.make: row", row, [pos.shape[0]])
        elif table.shape[0] != pos.shape[0]:
            expected = f"{pos.shape[0]}, one per row of pos, or the argument row"
            raise CacheError("CacheIndex.make: table", f"{table.shape[0]} rows", expected)
        pairs = check_pairs("CacheIndex.make: every", every)
        sizes = check_every_sizes("CacheIndex.make: every", [m for m, _ in pairs])
        shape = [table.shape[0], "context_m"]
        tables = [as_int32(f"CacheIndex.make: entries of {m}", slots, shape) for m, slots in pairs]
        return cls("tabled", pos, table, row, tuple(zip(sizes, tables, strict=True)))

    @classmethod
    def rows(cls, context: int, lens: Any, every: Iterable[int] = ()) -> CacheIndex:
        """Row b owns the `context` slots from b · context on and has lens[b] tokens, at positions 0 to lens[b] - 1.

        Rows are padded on the left to the longest, so the last token is every row's last; pad the ids the same way.
        The pools have len(lens) · context slots. For each m of every, row b also owns the c = ⌈context / m⌉
        slots from b · c on for its entries. Reads are slices of the pool, not gathers.

        Raises CacheError for no rows, a context below 1, a length outside 0 to context, an m below 2 or twice.
        """
        context = check_integer("CacheIndex.rows: context", context, 1)
        lens = check_lengths("CacheIndex.rows: lens", lens, context)
        if not lens:
            raise CacheError("CacheIndex.rows: lens", "no rows", "one length per row")
        if len(lens) * context > INT32_MAX:
            slots = f"{len(lens)} rows of {context} slots"
            raise CacheError("CacheIndex.rows: context", slots, f"at most {INT32_MAX} slots, which int32 can number")
        sizes = check_every_sizes("CacheIndex.rows: every", every)
        entry_tables = tuple((m, mx.array(contiguous_table(len(lens), ceil_div(context, m)))) for m in sizes)
        pos = mx.array(left_padded_positions([[length] for length in lens], max(1, *lens)))
        table = mx.array(contiguous_table(len(lens), context))
        return cls("tabled", pos, table, None, entry_tables, contiguous_stride=context)

    @classmethod
    def whole(cls, batch: int, seq: int, lens: Any = None) -> CacheIndex:
        """Whole sequences at positions 0 to seq - 1: nothing is read or written, and extend returns the pool as it is.

        With lens, row b has lens[b] tokens, padded on the left. Raises CacheError for a batch or seq below 1, or a
        length that does not fit.
        """
        batch = check_integer("CacheIndex.whole: batch", batch, 1)
        seq = check_integer("CacheIndex.whole: seq", seq, 1)
        lens = [seq] * batch if lens is None else check_lengths("CacheIndex.whole: lens", lens, seq)
        if len(lens) != batch:
            raise CacheError("CacheIndex.whole: lens", f"{len(lens)} lengths", f"{batch}, one per row")
        return cls("whole", mx.array(left_padded_positions([[length] for length in lens], seq)))

    @classmethod
    def packed(cls, seq: int, lens: Any) -> CacheIndex:
        """Rows of several whole sequences, for a packed prefill: row b has lens[b][0], then lens[b][1], ... tokens.

        Rows are padded on the left to seq. A token attends to the tokens of its own sequence at or before it. Raises
        CacheError for no rows, a seq below 1, a negative length, or a row of more than seq tokens.
        """
        seq = check_integer("CacheIndex.packed: seq", seq, 1)
        lengths = check_packed_lengths("CacheIndex.packed: lens", lens, seq)
        return cls("packed", mx.array(left_padded_positions(lengths, seq)))

    # Other readings of the same tokens

    def window(self, w: int) -> CacheIndex:
        """The index whose tokens attend to the last w ≥ 1 positions up to their own; replaces the window it had."""
        return replace(self, window_size=check_integer("CacheIndex.window", w, 1))

    def select(self, columns: Any) -> CacheIndex:
        """The index whose tokens read only the columns int32 [batch, seq, k] that they select, in that order.

        extend's seen is then [batch, seq, k, ...] and mask [batch, seq, k]. A column that the token does not attend to
        reads as zero and is masked; one without a slot reads as zero; one selected twice is read twice. Writes do not
        change. On a whole index a column is a token of the batch row, or under every an entry. Replaces the selection
        it had. Raises CacheError for another shape, k = 0, a draft or a ring.
        """
        if self.ancestor_mask is not None or self.is_ring:
            raise CacheError("CacheIndex.select", "a ring" if self.is_ring else "a draft", "an index without one")
        columns = as_int32("CacheIndex.select: columns", columns, [self.batch, self.seq, "k"])
        return replace(self, selected_columns=columns)

    def draft(self, slots: Any, sees: Any) -> CacheIndex:
        """The index whose tokens are a draft to verify in one call, such as a draft tree.

        slots, int32 [batch, seq], is where each token is written (-1: nowhere), slots that no table names. sees, bool
        [batch, seq, seq], says to which tokens of its batch row each attends: in a tree, itself and its ancestors. The
        table holds each sequence up to the call, and the columns are the table's, then the tokens: extend's seen is
        what the table reads, then values. A token attends to the table's columns before its row's least position and to
        the tokens that sees says, of both those at or before its position and inside the window. Afterwards the caller
        accepts a path by writing the slots of its tokens into the next call's table; the others are free, and nothing
        is copied.

        Replaces the draft it had. Raises CacheError for another shape, or an index that is whole, reads entries of
        several positions or selects.
        """
        if self.kind != "tabled" or self.positions_per_entry != 1 or self.selected_columns is not None:
            expected = "an index over a table, of single positions and without a selection"
            raise CacheError("CacheIndex.draft", repr(self), expected)
        write_slots = as_int32("CacheIndex.draft: slots", slots, [self.batch, self.seq])
        ancestor_mask = as_bool("CacheIndex.draft: sees", sees, [self.batch, self.seq, self.seq])
        return replace(self, write_slots=write_slots, ancestor_mask=ancestor_mask)

    def write_at(self, slots: Any) -> CacheIndex:
        """The whole or packed index whose tokens are also written, at slots int32 [batch, seq] (-1: nowhere).

        seen stays values, and extend's pool' has them at the slots: so a packed prefill fills the cache of several
        sequences. Raises CacheError for another shape, or an index over a table or in entries of several
        positions.
        """
        if self.table is not None or self.positions_per_entry != 1:
            raise CacheError("CacheIndex.write_at", repr(self), "a whole or packed index of single positions")
        return replace(self, write_slots=as_int32("CacheIndex.write_at: slots", slots, [self.batch, self.seq]))

    def every(self, m: int) -> CacheIndex:
        """The index read in entries of m positions, for a layer whose pools have one entry per m positions (law 1).

        extend writes the values of the tokens that end an entry; a token attends to an entry from its last position on,
        and under a window only while that position is inside. The pools are those of the entries' table. On a whole
        index the columns are the row's ⌈seq / m⌉ entries, and seen the values of the tokens that end them, zero where
        none does. every(m) of an index in entries of m is itself. Raises CacheError for an m below 1 and, unless it is
        that, for an index in entries of another size, with a selection, a draft or slots to write at, packed, or
        without a table of entries of m.
        """
        m = check_integer("CacheIndex.every", m, 1)
        if m == self.positions_per_entry:
            return self
        is_plain = self.positions_per_entry == 1 and self.selected_columns is None and self.write_slots is None
        if not is_plain or self.kind == "packed":
            expected = "an index of positions, unpacked, no selection or draft"
            raise CacheError(f"CacheIndex.every({m})", repr(self), expected)
        sizes = [size for size, _ in self.entry_tables]
        if self.kind == "tabled" and m not in sizes:
            raise CacheError("CacheIndex.every", m, f"one of the sizes of its tables of entries: {sizes}")
        return replace(self, positions_per_entry=m)

    def advance(self) -> CacheIndex:
        """The index of the next token of every batch row: one past its greatest position, or 0 in a row of padding.

        Has the same window and every, no selection and no draft. Where two batch rows name one sequence this is not the
        sequence's next position: make the index there. Raises CacheError on a whole index.
        """
        if self.kind != "tabled":
            raise CacheError("CacheIndex.advance", repr(self), "an index over a table: a whole one writes nothing")
        next_positions = mx.maximum(self.effective_positions.max(axis=1, keepdims=True), -1) + 1
        return self._with_token_positions(next_positions)

    def with_positions(self, pos: Any) -> CacheIndex:
        """The index of other tokens of these batch rows, at positions pos int32 [batch, seq], without selection and
        draft.

        `rows` places tokens at the first positions; a step that continues sequences places its own. Raises CacheError
        for another number of batch rows, or on a whole index, whose tokens are its columns.
        """
        if self.table is None:
            raise CacheError("CacheIndex.with_positions", repr(self), "an index over a table")
        return self._with_token_positions(as_int32("CacheIndex.with_positions: pos", pos, [self.batch, "seq"]))

    def limit_context(self, context: int) -> CacheIndex:
        """The index that reads only the first `context` columns; the caller promises that positions fit.

        A token past them writes nothing. Tables of entries of m keep the ⌈context / m⌉ entries those positions need. An
        index of `rows` keeps its contiguous slots and stays a slice of the pool, and `walk` says so: without
        limit_context, an index of `rows` walks as any table of its shape and reads by gathers once it is rebuilt.
        Raises CacheError for a context outside 1 to the table's, a ring, or a whole index.
        """
        if self.table is None or self.is_ring:
            raise CacheError("CacheIndex.limit_context", repr(self), "an index over a table, no ring")
        context = check_integer("CacheIndex.limit_context", context, 1, self.table.shape[1])
        entry_tables = tuple((m, table[:, : ceil_div(context, m)]) for m, table in self.entry_tables)
        is_contiguous = self.contiguous_stride is not None
        table = self.table[:, :context]
        return replace(self, table=table, entry_tables=entry_tables, stride_in_signature=is_contiguous)

    def as_ring(self) -> CacheIndex:
        """The index whose columns are used again, for sequences longer than the table that attend through a window.

        Position p has column p mod context, and a column is at the last position up to the row's greatest (under a
        draft: before its least) that has it. So a table of as many columns as the window has positions, and one more
        for each further token of a call, holds all that tokens attend to, however long the sequences: `mask` and what
        needs it raise CacheError without a window, or for a larger one. The batch rows of one sequence count as one
        call. Positions have no bound. Raises CacheError for an index that is whole, has a limited context or tables of
        entries, or selects.
        """
        has_entries = bool(self.entry_tables)
        if self.table is None or has_entries or self.selected_columns is not None or self.stride_in_signature:
            expected = "an index over a whole table, without tables of entries or a selection"
            raise CacheError("CacheIndex.as_ring", repr(self), expected)
        return replace(self, is_ring=True)

    def for_heads(self, num_heads: int, head_span: int) -> CacheIndex:
        """The index over pools [num_heads · slots, dim] that keep heads apart; its batch rows are the pairs
        (row, head).

        head_span slots of a head lie together, and those of the next head follow: head h of slot s is row
        (s // head_span · num_heads + h) · head_span + s mod head_span of the pool; with the number of slots as
        head_span that is h · slots + s. The number of slots is a multiple of head_span. extend takes values
        [batch · num_heads, seq, dim] or [batch, num_heads, seq, dim], and returns seen [batch · num_heads, context,
        dim], which reshapes to [batch, num_heads, context, dim] without a copy. An index of `rows` without tables of
        entries stays a slice of the pool where head_span is its context before limit_context: then the pool is
        [batch, num_heads, context, dim] in memory. Raises CacheError for a num_heads or a head_span below 1.
        """
        return head_index.index_for_heads(self, num_heads, head_span)

    def for_key_value_pool(self, value_offset: int) -> CacheIndex:
        """The index over pools that hold two such pools, the second from row value_offset on, as keys and values; its
        batch rows are those over the first, then those over the second.

        The first pool has exactly value_offset rows. extend takes values [2 · batch, seq, ...], and returns seen
        likewise. A slice of the pool stays one where the second pool follows the rows of the first immediately. Raises
        CacheError for a negative value_offset, or an index with tables of entries.
        """
        return head_index.index_for_key_value_pool(self, value_offset)

    def with_spare_pool_row(self, pool_row: int) -> CacheIndex:
        """The index for pools of which nothing reads the row pool_row: values without a slot are written there.

        A write is then one scatter; without a spare row it takes two, since MLX cannot drop a write. No table may name
        the row. Raises CacheError for a negative row.
        """
        return replace(self, spare_pool_row=check_integer("CacheIndex.with_spare_pool_row", pool_row, 0, INT32_MAX))

    # The call's tokens

    @property
    def batch(self) -> int:
        """The number of batch rows."""
        return self.token_positions.shape[0]

    @property
    def seq(self) -> int:
        """The number of tokens of each batch row, padding included."""
        return self.token_positions.shape[1]

    @property
    def context(self) -> int:
        """The number of columns: the table's width (and seq under a draft), or a whole index's tokens or entries."""
        if self.table is None:
            return ceil_div(self.seq, self.positions_per_entry)
        return self.batch_table.shape[1] + (0 if self.ancestor_mask is None else self.seq)

    def positions(self) -> mx.array:
        """The tokens' positions, int32 [batch, seq], padding 0, at most the last column of the positions' table.

        For rotary embeddings, and for indexing a table of position embeddings. The same whatever `every`.
        """
        if self.max_position is None:
            return mx.maximum(self.effective_positions, 0)
        return mx.clip(self.effective_positions, 0, last_index(self.max_position + 1))

    @property
    def max_position(self) -> int | None:
        """The largest number that `positions` gives: the last column of the positions' table; None in a ring."""
        if self.is_ring:
            return None
        return (self.seq if self.table is None else self.table.shape[1]) - 1

    # Pools

    def extend(self, values: Any, pool: Any, *, zero_unseen: bool = True) -> tuple[mx.array, mx.array]:
        """Writes values [batch, seq, ...] to pool [slots, ...] and reads what the tokens attend over: (seen, pool').

        pool' differs from pool only in the slots that the tokens address. It takes pool's memory, at the cost of the
        call's tokens, when nothing else refers to pool at evaluation: let `Pools` own it, and pass each pool to one
        extend a step. seen, [batch, context, ...], is read from pool', zero in the columns that no token of the batch
        row attends to or that have no slot; under a selection [batch, seq, k, ...]; under a draft the table's columns,
        then values. On a whole index pool' is pool and seen is values, under every or a selection the values at these
        columns. zero_unseen=False is as in read. Raises CacheError for values of another shape or dtype than the
        pool's.
        """
        values, pool = self._checked_arrays("CacheIndex.extend", values, pool)
        pool = self._write(values, pool)
        if self.table is not None and self.ancestor_mask is None:
            return self._read(pool, zero_unseen), pool
        values = values.reshape(self.batch, self.seq, *pool.shape[1:])
        if self.table is not None:
            return mx.concatenate([self._read(pool, zero_unseen), values], axis=1), pool
        if self.selected_columns is None and self.positions_per_entry == 1:
            return values, pool
        flat_values = values.reshape(self.batch * self.seq, *pool.shape[1:])
        return read_pool_rows(flat_values, self.column_slots, self.read_mask), pool

    def write(self, values: Any, pool: Any) -> mx.array:
        """The pool' of extend alone."""
        values, pool = self._checked_arrays("CacheIndex.write", values, pool)
        return self._write(values, pool)

    def read(self, pool: Any, *, zero_unseen: bool = True) -> mx.array:
        """The seen of extend alone, from a pool that write returned.

        With zero_unseen=False a column that no token attends to may have what its slot holds, or what the first slot of
        the row holds: contiguous slots are then read by a view of the pool, without a copy, and a table by a gather
        only. That breaks law 6 and is for pools that never held NaN or infinity. Raises CacheError on a whole index and
        under a draft, of whose columns the pool does not hold all.
        """
        if self.table is None or self.write_slots is not None:
            expected = "an index over a table, without a draft"
            raise CacheError("CacheIndex.read", repr(self), expected, "Use extend here.")
        return self._read(pool if isinstance(pool, mx.array) else mx.array(pool), zero_unseen)

    def mask(self) -> mx.array:
        """Which columns of seen each token attends to: bool [batch, seq, context], or [batch, seq, k] if it selects."""
        return self.visible_columns

    def column_positions(self) -> mx.array:
        """The position of each column, int32 [batch, context]: its own number, an entry's last position, or under a
        draft and on a whole index the position of the token that the column is. Raises CacheError for a whole index in
        entries of several positions, and under a selection."""
        if self.selected_columns is not None or (self.table is None and self.positions_per_entry != 1):
            expected = "an index without a selection, and of positions if whole"
            raise CacheError("CacheIndex.column_positions", repr(self), expected)
        if self.table is None:
            return self.effective_positions
        shape = (self.batch, self.batch_table.shape[1])
        table_positions = mx.broadcast_to(visibility.table_column_positions(self), shape)
        if self.ancestor_mask is None:
            return table_positions
        return mx.concatenate([table_positions, self.effective_positions], axis=1)

    def visible(self) -> mx.array:
        """mask for mx.fast.scaled_dot_product_attention: bool [batch, 1, seq, context], or k in place of context."""
        return self.visible_columns[:, None]

    # Structure

    def walk(self) -> tuple[IndexSignature, list[mx.array]]:
        """(signature, leaves): what a compiled step depends on beside its shapes, hashable, and the arrays it takes.

        Two indices share a compiled step exactly when their signatures agree: the kind (whole, packed, tabled), whether
        row is there, the sizes of entries in order, every, the window, whether there are a selection and a draft, the
        contiguous_stride of an index of `rows` with a limited context, the spare row, whether a whole index writes its
        tokens, and whether it is a ring. Leaves in order: row, positions, table, tables of entries, columns, the slots
        of a draft or of write_at, the draft's sees.
        """
        signature = (
            ("tokens", self.kind, self.table_row is not None, tuple(m for m, _ in self.entry_tables)),
            ("every", self.positions_per_entry),
            ("window", self.window_size),
            ("columns", self.selected_columns is not None),
            ("draft", self.ancestor_mask is not None),
            ("contiguous_stride", self.contiguous_stride if self.stride_in_signature else None),
            ("spare_pool_row", self.spare_pool_row),
            ("writes", self.table is None and self.write_slots is not None),
            ("ring", self.is_ring),
        )
        leaves = [self.table_row, self.token_positions, self.table, *(table for _, table in self.entry_tables)]
        leaves += [self.selected_columns, self.write_slots, self.ancestor_mask]
        return signature, [leaf for leaf in leaves if leaf is not None]

    @classmethod
    def from_walk(cls, signature: IndexSignature, leaves: Sequence[mx.array]) -> CacheIndex:
        """The index of a walk, also over a step's tracers: from_walk(*index.walk()) is index.

        Raises CacheError for another number of leaves than the signature's.
        """
        (_, kind, has_row, sizes), *reports = signature
        every, window, has_selection, has_draft, contiguous_stride, spare_pool_row, writes, is_ring = (
            value for _, value in reports
        )
        has_table = kind == "tabled"
        count = 1 + has_table + has_row + len(sizes) + has_selection + 2 * has_draft + writes
        if len(leaves) != count:
            raise CacheError("CacheIndex.from_walk", f"{len(leaves)} leaves", f"{count} for {signature}")
        rest = iter(leaves)
        return cls(
            kind=kind,
            table_row=next(rest) if has_row else None,
            token_positions=next(rest),
            table=next(rest) if has_table else None,
            entry_tables=tuple((m, next(rest)) for m in sizes),
            positions_per_entry=every,
            window_size=window,
            selected_columns=next(rest) if has_selection else None,
            write_slots=next(rest) if has_draft or writes else None,
            ancestor_mask=next(rest) if has_draft else None,
            contiguous_stride=contiguous_stride,
            stride_in_signature=contiguous_stride is not None,
            spare_pool_row=spare_pool_row,
            is_ring=is_ring,
        )

    def place(self, at: mx.Device | mx.Stream | mx.DeviceType) -> CacheIndex:
        """The index whose arrays are made where `at` computes. MLX's memory is shared, so values need no transfer."""
        if not isinstance(at, (mx.Device, mx.Stream, mx.DeviceType)):
            raise CacheError("CacheIndex.place", repr(at), "an MLX device or stream")

        def copy(array: mx.array) -> mx.array:
            return mx.contiguous(array, stream=at)

        return self.map_arrays(copy, copy)

    def map_arrays(
        self, per_row: Callable[[mx.array], mx.array], per_slot: Callable[[mx.array], mx.array]
    ) -> CacheIndex:
        """The index with per_slot applied to the arrays of slots (tables and write_slots), and per_row to the others,
        whose axis 0 counts batch rows."""

        def mapped(function: Callable[[mx.array], mx.array], array: mx.array | None) -> mx.array | None:
            return None if array is None else function(array)

        return replace(
            self,
            token_positions=per_row(self.token_positions),
            table=mapped(per_slot, self.table),
            table_row=mapped(per_row, self.table_row),
            entry_tables=tuple((m, per_slot(table)) for m, table in self.entry_tables),
            selected_columns=mapped(per_row, self.selected_columns),
            write_slots=mapped(per_slot, self.write_slots),
            ancestor_mask=mapped(per_row, self.ancestor_mask),
        )

    def __repr__(self) -> str:
        words = [self.kind, f"batch={self.batch}", f"seq={self.seq}", f"context={self.context}"]
        words += [f"every={self.positions_per_entry}"] if self.positions_per_entry != 1 else []
        words += [f"window={self.window_size}"] if self.window_size is not None else []
        words += [f"select={self.selected_columns.shape[2]}"] if self.selected_columns is not None else []
        words += ["ring"] if self.is_ring else []
        if self.ancestor_mask is not None:
            words.append("draft")
        elif self.write_slots is not None:
            words.append("write")
        return f"CacheIndex({', '.join(words)})"

    # What the layers of a step share: computed once per index, not once per pool

    effective_positions = cached_property(visibility.effective_positions)
    visible_columns = cached_property(visibility.visible_columns)
    read_mask = cached_property(visibility.read_mask)
    batch_table = cached_property(slot_mapping.batch_table)
    column_slots = cached_property(slot_mapping.column_slots)
    safe_column_slots = cached_property(slot_mapping.safe_column_slots)
    slot_mapping = cached_property(slot_mapping.slot_mapping)

    def _with_token_positions(self, positions: mx.array) -> CacheIndex:
        return replace(self, token_positions=positions, selected_columns=None, write_slots=None, ancestor_mask=None)

    def _checked_arrays(self, where: str, values: Any, pool: Any) -> tuple[mx.array, mx.array]:
        values, pool = (x if isinstance(x, mx.array) else mx.array(x) for x in (values, pool))
        if pool.ndim == 0:
            raise CacheError(where, "a pool of shape []", "an axis of slots")
        expected = (self.batch, self.seq, *pool.shape[1:])
        shape = values.shape
        if values.ndim == pool.ndim + 2:  # rows and heads on axes of their own
            shape = (shape[0] * shape[1], *shape[2:])
        if shape != expected or values.dtype != pool.dtype:
            found = f"values of shape {list(values.shape)} and {values.dtype}"
            raise CacheError(where, found, f"{list(expected)} and {pool.dtype}, as index and pool have them")
        return values, pool

    def _write(self, values: mx.array, pool: mx.array) -> mx.array:
        if self.table is None and self.write_slots is None:
            return pool
        flat_values = values.reshape(self.batch * self.seq, *pool.shape[1:])
        return write_pool_rows(pool, self.slot_mapping, flat_values, self.spare_pool_row)

    def _read(self, pool: mx.array, zero_unseen: bool) -> mx.array:
        rows, context = self.batch_table.shape
        contiguous_stride = (
            None if self.contiguous_stride is None else ceil_div(self.contiguous_stride, self.positions_per_entry)
        )
        is_selection = self.selected_columns is not None
        if contiguous_stride is not None and not is_selection and pool.shape[0] >= rows * contiguous_stride:
            seen = view_contiguous(pool, rows, contiguous_stride, context)
            return zero_masked(seen, self.read_mask) if zero_unseen else seen
        if zero_unseen or is_selection or pool.size == 0:
            return read_pool_rows(pool, self.column_slots, self.read_mask)
        return mx.take(pool, mx.minimum(self.safe_column_slots, pool.shape[0] - 1), axis=0)
