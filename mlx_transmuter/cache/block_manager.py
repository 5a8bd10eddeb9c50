"""Slots: who owns which slot of the pools, on the host: blocks by demand, shared prefixes, forks, kept prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_transmuter.cache.errors import CacheError, check_integer

# The number of the kept block before, and the tokens of this one: names the whole prefix.
_PrefixKey = tuple[int, tuple[int | None, ...]]


@dataclass
class _SequenceBlocks:
    tokens: list[int | None] = field(default_factory=list)  # None: not told
    num_dropped_blocks: int = 0  # blocks
    block_buffer: np.ndarray = field(default_factory=lambda: np.empty(64, np.int32))
    num_blocks: int = 0

    @property
    def blocks(self) -> np.ndarray:
        """From the first that was not dropped, int32: a view, no list that every table would turn into an array."""
        return self.block_buffer[: self.num_blocks]

    def add_blocks(self, blocks: Sequence[int] | np.ndarray) -> None:
        """More blocks after those it has."""
        held = self.num_blocks + len(blocks)
        if held > len(self.block_buffer):
            self.block_buffer = np.concatenate([self.blocks, np.empty(2 * held, np.int32)])
        self.block_buffer[self.num_blocks : held] = blocks
        self.num_blocks = held


class BlockManager:
    """Hands out the slots of the pools in blocks of `block` slots, and gives the tables that CacheIndex.make takes.

    A sequence owns as many blocks as its tokens need, in the order of their positions. Blocks are shared by counting
    their users: between forks, and between prompts that begin alike. A shared block is never written: a sequence whose
    last block is shared and partly filled gets its own copy of it at its next append, which says what to copy.

        sequence, stored = slots.open(prompt)          # stored: tokens whose keys and values are in the pools already
        copies = slots.append(sequence, prompt[stored:])
        table = slots.table([sequence], context)       # ... the step that stores them runs ...
        slots.keep(sequence)                           # now others may find its full blocks
        slots.free(sequence)

    Kept blocks without a user stay until their slots are wanted; the least recently used goes first. They are found by
    their tokens and by the kept block before them, so a hit means the same whole prefix: Python's dict hashes the pair
    and compares it, and a number that stands for a prefix is never given twice.

    slots: how many the pools have, a multiple of block. Raises CacheError, as every method does for a wrong argument.
    """

    def __init__(self, num_slots: int, block_size: int = 1):
        self.block_size = check_integer("Slots: block", block_size, 1)
        self._ref_counts = np.zeros(0, np.int32)
        self._free_blocks: list[int] = []
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._last_sequence_id = 0
        self._block_of_prefix: dict[_PrefixKey, int] = {}  # kept blocks
        self._prefix_of_block: dict[int, tuple[int, _PrefixKey]] = {}  # block → its number, its key
        self._blocks_after: dict[int, set[int]] = {}  # number → the kept blocks that follow
        self._last_prefix_id = 0  # 0 stands for the empty prefix
        self._evictable_blocks: OrderedDict[int, None] = (
            OrderedDict()
        )  # kept, without a user; least recently used first
        self.grow(num_slots)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self._ref_counts) * self.block_size

    @property
    def free_slots(self) -> int:
        """How many slots an append can still get: those nobody owns, and those of kept blocks without a user."""
        return (len(self._free_blocks) + len(self._evictable_blocks)) * self.block_size

    @property
    def stored_slots(self) -> int:
        """How many slots are those of kept blocks."""
        return len(self._prefix_of_block) * self.block_size

    @property
    def evictable_slots(self) -> int:
        """How many slots are those of kept blocks without a user."""
        return len(self._evictable_blocks) * self.block_size

    def length(self, sequence: int) -> int:
        """The number of tokens of the sequence."""
        return len(self._sequence("length", sequence).tokens)

    def open(self, tokens: Iterable[int] = ()) -> tuple[int, int]:
        """(sequence, n): a new sequence, which begins with the n first tokens found in kept blocks.

        Whole blocks, and at least the last token is never found, so that a step has a token to run.
        """
        opened = _SequenceBlocks()
        for block, part in self._matching_blocks(_token_ids("Slots.open", tokens)):
            self._ref_counts[block] += 1
            self._evictable_blocks.pop(block, None)
            opened.add_blocks([block])
            opened.tokens += part
        return self._register(opened), len(opened.tokens)

    def match_prefix(self, tokens: Iterable[int]) -> int:
        """How many first tokens an `open` would find, which this is not: nothing is used."""
        return sum(len(part) for _, part in self._matching_blocks(_token_ids("Slots.find", tokens)))

    def append(self, sequence: int, tokens: Iterable[int] | int) -> list[tuple[int, int]]:
        """Gives slots to more tokens; the copies (from slot, to slot) to make before the step that runs them.

        tokens: their ids, or only how many (those are never found again). Copies arise where the last block is partly
        filled and not the sequence's alone. Raises CacheError, and changes nothing, when the slots don't suffice.
        """
        to = self._sequence("append", sequence)
        count = isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool)
        more = (
            [None] * check_integer("Slots.append: tokens", tokens, 0) if count else _token_ids("Slots.append", tokens)
        )
        filled = len(to.tokens) % self.block_size
        moves = bool(more and filled) and self._is_shared(to.blocks[-1:])
        wanted = -(-(len(to.tokens) + len(more)) // self.block_size) - to.num_dropped_blocks - to.num_blocks + moves
        if wanted * self.block_size > self.free_slots:
            found = f"{wanted * self.block_size} slots wanted and {self.free_slots} of {self.num_slots} free"
            do = "Free a sequence, or grow the slots and with them the pools."
            raise CacheError("Slots.append", found, f"at most {self.free_slots} wanted", do)
        copies = []
        if moves:
            old, new = int(to.blocks[-1]), self._allocate_block()
            copies = [(old * self.block_size + i, new * self.block_size + i) for i in range(filled)]
            to.blocks[-1] = new
            self._release_blocks([old])
            wanted -= 1
        to.add_blocks([self._allocate_block() for _ in range(wanted)])
        to.tokens += more
        return copies

    def fork(self, sequence: int, num_tokens: int | None = None) -> int:
        """A new sequence of the first `length` tokens (by default all) of this one, in its slots: nothing is copied."""
        of = self._sequence("fork", sequence)
        num_tokens = len(of.tokens) if num_tokens is None else self._checked_length("fork", of, num_tokens)
        forked = _SequenceBlocks(of.tokens[:num_tokens], of.num_dropped_blocks)
        forked.add_blocks(of.blocks[: -(-num_tokens // self.block_size) - of.num_dropped_blocks])
        self._ref_counts[forked.blocks] += 1  # they have a user already, so none is idle
        return self._register(forked)

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Takes the tokens after the first `length` off the sequence, and their slots."""
        of = self._sequence("trim", sequence)
        num_tokens = self._checked_length("trim", of, num_tokens)
        keep = -(-num_tokens // self.block_size) - of.num_dropped_blocks
        self._release_blocks(of.blocks[keep:])
        of.num_blocks = keep
        del of.tokens[num_tokens:]

    def free_before(self, sequence: int, position: int) -> None:
        """Takes the slots of the whole blocks of tokens before position `before`, at which no token looks any more.

        The sequence goes on and can be forked, but neither be set back to before there nor be kept.
        """
        of = self._sequence("drop", sequence)
        count = (
            check_integer("Slots.drop: before", position, 0, len(of.tokens)) // self.block_size - of.num_dropped_blocks
        )
        if count > 0:
            self._release_blocks(of.blocks[:count])
            of.block_buffer, of.num_blocks, of.num_dropped_blocks = (
                of.block_buffer[count:],
                of.num_blocks - count,
                of.num_dropped_blocks + count,
            )

    def first_position(self, sequence: int) -> int:
        """The first position of the sequence that still has a slot; its length where none has."""
        of = self._sequence("first", sequence)
        return min(of.num_dropped_blocks * self.block_size, len(of.tokens))

    def accept_draft(self, sequence: int, draft: int, accepted: Sequence[int]) -> None:
        """Ends the sequence `other`; its tokens at `places` become the next tokens of `sequence`, in their slots.

        So a path through a tree of guesses is kept and nothing is copied. Raises CacheError for blocks of more than one
        slot, whose places in a sequence are fixed, for places outside `other` or twice, for slots that others share or
        may find, and where some of `other` were dropped.
        """
        to, of = self._sequence("adopt", sequence), self._sequence("adopt", draft)
        accepted = [check_integer("Slots.adopt: places", place, 0, len(of.tokens) - 1) for place in accepted]
        if self.block_size != 1 or sequence == draft or len(set(accepted)) != len(accepted) or of.num_dropped_blocks:
            found = f"blocks of {self.block_size} and places {accepted} of sequence {draft}"
            raise CacheError("Slots.adopt", found, "blocks of 1, and each place of another sequence once")
        if self._is_shared(of.blocks[accepted]):
            raise CacheError("Slots.adopt", "slots that another sequence shares", "slots of the sequence alone")
        to.tokens += [of.tokens[place] for place in accepted]
        to.add_blocks(of.blocks[accepted])
        self._release_blocks(np.delete(of.blocks, accepted))
        del self._sequences[draft]

    def store_prefix(self, sequence: int, tokens: Iterable[int] | None = None) -> None:
        """Lets other sequences find the full blocks of this one: call it once a step has stored their tokens.

        tokens: the ids of its first ones, where `append` was told only how many. Raises CacheError for more than it
        has, and for a sequence whose first tokens were dropped.
        """
        of = self._sequence("keep", sequence)
        if of.num_dropped_blocks:
            found = f"a sequence without the slots of its first {of.num_dropped_blocks * self.block_size} tokens"
            raise CacheError("Slots.keep", found, "one that has all of them")
        if tokens is not None:
            told = _token_ids("Slots.keep", tokens)
            if len(told) > len(of.tokens):
                raise CacheError("Slots.keep: tokens", f"{len(told)}", f"at most the sequence's {len(of.tokens)}")
            of.tokens[: len(told)] = told
        number, found = 0, []
        for at, block in enumerate(of.blocks[: len(of.tokens) // self.block_size].tolist()):
            part = of.tokens[at * self.block_size : (at + 1) * self.block_size]
            if None in part:
                break
            key = (number, tuple(part))
            if key not in self._block_of_prefix:
                self._store_block(block, key)
            found.append(self._block_of_prefix[key])
            number = self._prefix_of_block[found[-1]][0]
        for block in reversed(found):  # of an earlier sequence with the same tokens: used now too
            if block in self._evictable_blocks:
                self._evictable_blocks.move_to_end(block)

    def stored_blocks(self) -> list[tuple[int, tuple[int | None, ...], int]]:
        """(before, tokens, block) of every kept block; before: the place in this list of the block before it, or -1."""
        blocks = sorted(
            self._prefix_of_block, key=lambda block: self._prefix_of_block[block][0]
        )  # one follows only what was kept earlier
        places = {self._prefix_of_block[block][0]: place for place, block in enumerate(blocks)}
        return [
            (places.get(key[0], -1), key[1], block) for block in blocks for _, key in [self._prefix_of_block[block]]
        ]

    def restore_blocks(self, prefix_blocks: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
        """Keeps blocks (before, tokens), as `kept` lists them, in free slots; returns the blocks.

        Fill their slots next. Raises CacheError, and keeps none of them, for a block that comes before the one it
        follows, is kept already, isn't full, or finds no slot.
        """
        blocks: list[int] = []
        try:
            for before, tokens in prefix_blocks:
                before = check_integer("Slots.restore: before", before, -1, len(blocks) - 1)
                part = tuple(_token_ids("Slots.restore", tokens))
                key = (self._prefix_of_block[blocks[before]][0] if before >= 0 else 0, part)
                if len(part) != self.block_size or key in self._block_of_prefix or not self._free_blocks:
                    raise CacheError("Slots.restore", f"block {len(blocks)}", "a full block, kept once, and free slots")
                block = self._allocate_block()
                self._store_block(block, key)
                blocks.append(block)
        except CacheError:
            for block in reversed(blocks):
                self._evict(block)
                self._release_blocks([block])
            raise
        self._release_blocks(blocks)
        return blocks

    def free(self, sequence: int) -> None:
        """Ends the sequence: its slots are free again, or idle where its blocks are kept."""
        self._release_blocks(self._sequence("free", sequence).blocks)
        del self._sequences[sequence]

    def grow(self, num_slots: int) -> None:
        """From now on there are `slots` slots, not fewer than before; grow the pools too."""
        num_slots = check_integer("Slots: slots", num_slots, self.num_slots)
        if num_slots % self.block_size:
            raise CacheError("Slots: slots", num_slots, f"a multiple of the block of {self.block_size}")
        blocks = range(len(self._ref_counts), num_slots // self.block_size)
        self._ref_counts = np.concatenate([self._ref_counts, np.zeros(len(blocks), np.int32)])
        self._free_blocks[:0] = reversed(blocks)

    def table(self, sequences: Sequence[int | None], context: int, *, ring: bool = False) -> np.ndarray:
        """int32 [rows, context] for CacheIndex.make: the slots of each sequence's tokens, then -1; None: all -1.

        ring: for CacheIndex.ring, of the last `context` tokens, position p at column p mod context.
        """
        context = check_integer("Slots.table: context", context, 1)
        table, inside = np.full((len(sequences), context), -1, np.int32), np.arange(self.block_size, dtype=np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            if sequence is None:
                continue
            of = self._sequence("table", sequence)
            length = len(of.tokens)
            if length > context and not ring:
                raise CacheError("Slots.table: context", context, f"at least {length}, as sequence {sequence} has")
            start = max(of.num_dropped_blocks, (length - context) // self.block_size)
            slots = (of.blocks[start - of.num_dropped_blocks :, None] * self.block_size + inside).reshape(-1)
            first = max(start * self.block_size, length - context)
            columns = slice(first, length) if length <= context else np.arange(first, length) % context
            row[columns] = slots[first - start * self.block_size : length - start * self.block_size]
        return table

    def _sequence(self, what: str, sequence: int) -> _SequenceBlocks:
        if sequence not in self._sequences:
            raise CacheError(f"Slots.{what}: sequence", repr(sequence), f"an open one, of {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _checked_length(self, what: str, of: _SequenceBlocks, length: int) -> int:
        return check_integer(
            f"Slots.{what}: length",
            length,
            min(of.num_dropped_blocks * self.block_size, len(of.tokens)),
            len(of.tokens),
        )

    def _matching_blocks(self, prompt: list[int | None]) -> Iterator[tuple[int, tuple[int | None, ...]]]:
        """The kept blocks that the prompt begins with, and their tokens; without its last token."""
        number = 0
        for start in range(0, (len(prompt) - 1) // self.block_size * self.block_size, self.block_size):
            part = tuple(prompt[start : start + self.block_size])
            block = self._block_of_prefix.get((number, part))
            if block is None:
                return
            yield block, part
            number = self._prefix_of_block[block][0]

    def _register(self, sequence: _SequenceBlocks) -> int:
        self._last_sequence_id += 1
        self._sequences[self._last_sequence_id] = sequence
        return self._last_sequence_id

    def _store_block(self, block: int, key: _PrefixKey) -> None:
        assert block not in self._prefix_of_block, "a kept block's key never changes"
        self._last_prefix_id += 1
        self._block_of_prefix[key] = block
        self._prefix_of_block[block] = (self._last_prefix_id, key)
        self._blocks_after.setdefault(key[0], set()).add(block)

    def _is_shared(self, blocks: np.ndarray) -> bool:
        """Whether any of the blocks, which have a user, has another one or may be found by one."""
        return bool((self._ref_counts[blocks] > 1).any()) or not self._prefix_of_block.keys().isdisjoint(
            blocks.tolist()
        )

    def _allocate_block(self) -> int:
        """A block for one sequence alone: a free one, or the least recently used of the idle."""
        if not self._free_blocks:
            self._evict(next(iter(self._evictable_blocks)))
        block = self._free_blocks.pop()
        self._ref_counts[block] = 1
        return block

    def _release_blocks(self, blocks: Sequence[int] | np.ndarray) -> None:
        """One user less of each of these blocks, all different."""
        blocks = np.asarray(blocks, np.int32)
        self._ref_counts[blocks] -= 1
        # The end of a prefix is of no use without its beginning: it goes first.
        for block in blocks[self._ref_counts[blocks] == 0][::-1].tolist():
            if block in self._prefix_of_block:
                self._evictable_blocks[block] = None
            else:
                self._free_blocks.append(block)

    def _evict(self, block: int) -> None:
        """The block is no longer kept, nor are those after it, which nothing could find."""
        forgotten = [block]
        while forgotten:
            block = forgotten.pop()
            number, key = self._prefix_of_block.pop(block)
            del self._block_of_prefix[key]
            forgotten += self._blocks_after.pop(number, ())
            siblings = self._blocks_after.get(key[0])
            if siblings is not None:
                siblings.discard(block)
                if not siblings:
                    del self._blocks_after[key[0]]
            if block in self._evictable_blocks:
                del self._evictable_blocks[block]
                self._free_blocks.append(block)


def _token_ids(where: str, tokens: Any) -> list[int | None]:
    try:
        ids = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        return [check_integer(f"{where}: tokens", t, 0) for t in ids]
    except TypeError:
        raise CacheError(f"{where}: tokens", repr(tokens), "token ids") from None
