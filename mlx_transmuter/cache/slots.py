"""Slots: who owns which slot of the pools, on the host: blocks by demand, shared prefixes, forks, kept prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_transmuter.cache.error import CacheError, integer

# The number of the kept block before, and the tokens of this one: names the whole prefix.
_Key = tuple[int, tuple[int | None, ...]]


@dataclass
class _Sequence:
    tokens: list[int | None] = field(default_factory=list)  # None: not told
    blocks: list[int] = field(default_factory=list)  # from the first that was not dropped
    dropped: int = 0


class Slots:
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

    def __init__(self, slots: int, block: int = 1):
        self.block = integer("Slots: block", block, 1)
        self._uses: list[int] = []
        self._free: list[int] = []
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._found: dict[_Key, int] = {}  # kept blocks
        self._kept: dict[int, tuple[int, _Key]] = {}  # block → its number, its key
        self._after: dict[int, set[int]] = {}  # number → the kept blocks that follow
        self._numbers = 0  # 0 stands for the empty prefix
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept, without a user; least recently used first
        self.grow(slots)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self._uses) * self.block

    @property
    def free_slots(self) -> int:
        """How many slots an append can still get: those nobody owns, and those of kept blocks without a user."""
        return (len(self._free) + len(self._idle)) * self.block

    @property
    def kept_slots(self) -> int:
        """How many slots are those of kept blocks."""
        return len(self._kept) * self.block

    @property
    def idle_slots(self) -> int:
        """How many slots are those of kept blocks without a user."""
        return len(self._idle) * self.block

    def length(self, sequence: int) -> int:
        """The number of tokens of the sequence."""
        return len(self._of("length", sequence).tokens)

    def open(self, tokens: Iterable[int] = ()) -> tuple[int, int]:
        """(sequence, n): a new sequence, which begins with the n first tokens found in kept blocks.

        Whole blocks, and at least the last token is never found, so that a step has a token to run.
        """
        opened = _Sequence()
        for block, part in self._longest(_tokens("Slots.open", tokens)):
            self._use(block)
            opened.blocks.append(block)
            opened.tokens += part
        return self._named(opened), len(opened.tokens)

    def find(self, tokens: Iterable[int]) -> int:
        """How many first tokens an `open` would find, which this is not: nothing is used."""
        return sum(len(part) for _, part in self._longest(_tokens("Slots.find", tokens)))

    def append(self, sequence: int, tokens: Iterable[int] | int) -> list[tuple[int, int]]:
        """Gives slots to more tokens; the copies (from slot, to slot) to make before the step that runs them.

        tokens: their ids, or only how many (those are never found again). Copies arise where the last block is partly
        filled and not the sequence's alone. Raises CacheError, and changes nothing, when the slots don't suffice.
        """
        to = self._of("append", sequence)
        count = isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool)
        more = [None] * integer("Slots.append: tokens", tokens, 0) if count else _tokens("Slots.append", tokens)
        filled = len(to.tokens) % self.block
        moves = bool(more and filled) and (self._uses[to.blocks[-1]] > 1 or to.blocks[-1] in self._kept)
        wanted = -(-(len(to.tokens) + len(more)) // self.block) - to.dropped - len(to.blocks) + moves
        if wanted * self.block > self.free_slots:
            found = f"{wanted * self.block} slots wanted and {self.free_slots} of {self.slots} free"
            do = "Free a sequence, or grow the slots and with them the pools."
            raise CacheError("Slots.append", found, f"at most {self.free_slots} wanted", do)
        copies = []
        if moves:
            old, new = to.blocks[-1], self._claim()
            copies = [(old * self.block + i, new * self.block + i) for i in range(filled)]
            to.blocks[-1] = new
            self._release([old])
            wanted -= 1
        to.blocks += [self._claim() for _ in range(wanted)]
        to.tokens += more
        return copies

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence of the first `length` tokens (by default all) of this one, in its slots: nothing is copied."""
        of = self._of("fork", sequence)
        length = len(of.tokens) if length is None else self._length("fork", of, length)
        forked = _Sequence(of.tokens[:length], of.blocks[: -(-length // self.block) - of.dropped], of.dropped)
        for block in forked.blocks:
            self._use(block)
        return self._named(forked)

    def trim(self, sequence: int, length: int) -> None:
        """Takes the tokens after the first `length` off the sequence, and their slots."""
        of = self._of("trim", sequence)
        length = self._length("trim", of, length)
        keep = -(-length // self.block) - of.dropped
        self._release(of.blocks[keep:])
        del of.tokens[length:], of.blocks[keep:]

    def drop(self, sequence: int, before: int) -> None:
        """Takes the slots of the whole blocks of tokens before position `before`, at which no token looks any more.

        The sequence goes on and can be forked, but neither be set back to before there nor be kept.
        """
        of = self._of("drop", sequence)
        count = integer("Slots.drop: before", before, 0, len(of.tokens)) // self.block - of.dropped
        if count > 0:
            self._release(of.blocks[:count])
            del of.blocks[:count]
            of.dropped += count

    def first(self, sequence: int) -> int:
        """The first position of the sequence that still has a slot; its length where none has."""
        of = self._of("first", sequence)
        return min(of.dropped * self.block, len(of.tokens))

    def adopt(self, sequence: int, other: int, places: Sequence[int]) -> None:
        """Ends the sequence `other`; its tokens at `places` become the next tokens of `sequence`, in their slots.

        So a path through a tree of guesses is kept and nothing is copied. Raises CacheError for blocks of more than one
        slot, whose places in a sequence are fixed, for places outside `other` or twice, for slots that others share or
        may find, and where some of `other` were dropped.
        """
        to, of = self._of("adopt", sequence), self._of("adopt", other)
        places = [integer("Slots.adopt: places", place, 0, len(of.tokens) - 1) for place in places]
        if self.block != 1 or sequence == other or len(set(places)) != len(places) or of.dropped:
            found = f"blocks of {self.block} and places {places} of sequence {other}"
            raise CacheError("Slots.adopt", found, "blocks of 1, and each place of another sequence once")
        if any(self._uses[block] > 1 or block in self._kept for block in map(of.blocks.__getitem__, places)):
            raise CacheError("Slots.adopt", "slots that another sequence shares", "slots of the sequence alone")
        to.tokens += [of.tokens[place] for place in places]
        to.blocks += [of.blocks[place] for place in places]
        kept = set(places)
        self._release([block for place, block in enumerate(of.blocks) if place not in kept])
        del self._sequences[other]

    def keep(self, sequence: int, tokens: Iterable[int] | None = None) -> None:
        """Lets other sequences find the full blocks of this one: call it once a step has stored their tokens.

        tokens: the ids of its first ones, where `append` was told only how many. Raises CacheError for more than it
        has, and for a sequence whose first tokens were dropped.
        """
        of = self._of("keep", sequence)
        if of.dropped:
            found = f"a sequence without the slots of its first {of.dropped * self.block} tokens"
            raise CacheError("Slots.keep", found, "one that has all of them")
        if tokens is not None:
            told = _tokens("Slots.keep", tokens)
            if len(told) > len(of.tokens):
                raise CacheError("Slots.keep: tokens", f"{len(told)}", f"at most the sequence's {len(of.tokens)}")
            of.tokens[: len(told)] = told
        number, found = 0, []
        for at, block in enumerate(of.blocks[: len(of.tokens) // self.block]):
            part = of.tokens[at * self.block : (at + 1) * self.block]
            if None in part:
                break
            key = (number, tuple(part))
            if key not in self._found:
                self._keep(block, key)
            found.append(self._found[key])
            number = self._kept[found[-1]][0]
        for block in reversed(found):  # of an earlier sequence with the same tokens: used now too
            if block in self._idle:
                self._idle.move_to_end(block)

    def kept(self) -> list[tuple[int, tuple[int | None, ...], int]]:
        """(before, tokens, block) of every kept block; before: the place in this list of the block before it, or -1."""
        blocks = sorted(self._kept, key=lambda block: self._kept[block][0])  # one follows only what was kept earlier
        places = {self._kept[block][0]: place for place, block in enumerate(blocks)}
        return [(places.get(key[0], -1), key[1], block) for block in blocks for _, key in [self._kept[block]]]

    def restore(self, kept: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
        """Keeps blocks (before, tokens), as `kept` lists them, in free slots; returns the blocks.

        Fill their slots next. Raises CacheError, and keeps none of them, for a block that comes before the one it
        follows, is kept already, isn't full, or finds no slot.
        """
        blocks: list[int] = []
        try:
            for before, tokens in kept:
                before = integer("Slots.restore: before", before, -1, len(blocks) - 1)
                part = tuple(_tokens("Slots.restore", tokens))
                key = (self._kept[blocks[before]][0] if before >= 0 else 0, part)
                if len(part) != self.block or key in self._found or not self._free:
                    raise CacheError("Slots.restore", f"block {len(blocks)}", "a full block, kept once, and free slots")
                block = self._claim()
                self._keep(block, key)
                blocks.append(block)
        except CacheError:
            for block in reversed(blocks):
                self._forget(block)
                self._release([block])
            raise
        self._release(blocks)
        return blocks

    def free(self, sequence: int) -> None:
        """Ends the sequence: its slots are free again, or idle where its blocks are kept."""
        self._release(self._of("free", sequence).blocks)
        del self._sequences[sequence]

    def grow(self, slots: int) -> None:
        """From now on there are `slots` slots, not fewer than before; grow the pools too."""
        slots = integer("Slots: slots", slots, self.slots)
        if slots % self.block:
            raise CacheError("Slots: slots", slots, f"a multiple of the block of {self.block}")
        blocks = range(len(self._uses), slots // self.block)
        self._uses += [0] * len(blocks)
        self._free[:0] = reversed(blocks)

    def table(self, sequences: Sequence[int | None], context: int, *, ring: bool = False) -> np.ndarray:
        """int32 [rows, context] for CacheIndex.make: the slots of each sequence's tokens, then -1; None: all -1.

        ring: for CacheIndex.ring, of the last `context` tokens, position p at column p mod context.
        """
        context = integer("Slots.table: context", context, 1)
        table = np.full((len(sequences), context), -1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            if sequence is None:
                continue
            of = self._of("table", sequence)
            length = len(of.tokens)
            if length > context and not ring:
                raise CacheError("Slots.table: context", context, f"at least {length}, as sequence {sequence} has")
            start = max(of.dropped, (length - context) // self.block)
            blocks = np.asarray(of.blocks[start - of.dropped :], np.int32)
            slots = (blocks[:, None] * self.block + np.arange(self.block, dtype=np.int32)).reshape(-1)
            first = max(start * self.block, length - context)
            row[np.arange(first, length) % context] = slots[first - start * self.block : length - start * self.block]
        return table

    def _of(self, what: str, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise CacheError(f"Slots.{what}: sequence", repr(sequence), f"an open one, of {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _length(self, what: str, of: _Sequence, length: int) -> int:
        return integer(f"Slots.{what}: length", length, min(of.dropped * self.block, len(of.tokens)), len(of.tokens))

    def _longest(self, prompt: list[int | None]) -> Iterator[tuple[int, tuple[int | None, ...]]]:
        """The kept blocks that the prompt begins with, and their tokens; without its last token."""
        number = 0
        for start in range(0, (len(prompt) - 1) // self.block * self.block, self.block):
            part = tuple(prompt[start : start + self.block])
            block = self._found.get((number, part))
            if block is None:
                return
            yield block, part
            number = self._kept[block][0]

    def _named(self, sequence: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def _keep(self, block: int, key: _Key) -> None:
        assert block not in self._kept, "a kept block's key never changes"
        self._numbers += 1
        self._found[key] = block
        self._kept[block] = (self._numbers, key)
        self._after.setdefault(key[0], set()).add(block)

    def _use(self, block: int) -> None:
        self._uses[block] += 1
        self._idle.pop(block, None)

    def _claim(self) -> int:
        """A block for one sequence alone: a free one, or the least recently used of the idle."""
        if not self._free:
            self._forget(next(iter(self._idle)))
        block = self._free.pop()
        self._uses[block] = 1
        return block

    def _release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the end of a prefix is of no use without its beginning: it goes first
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            if block in self._kept:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _forget(self, block: int) -> None:
        """The block is no longer kept, nor are those after it, which nothing could find."""
        forgotten = [block]
        while forgotten:
            block = forgotten.pop()
            number, key = self._kept.pop(block)
            del self._found[key]
            forgotten += self._after.pop(number, ())
            siblings = self._after.get(key[0])
            if siblings is not None:
                siblings.discard(block)
                if not siblings:
                    del self._after[key[0]]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)


def _tokens(where: str, tokens: Any) -> list[int | None]:
    try:
        ids = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        return [integer(f"{where}: tokens", t, 0) for t in ids]
    except TypeError:
        raise CacheError(f"{where}: tokens", repr(tokens), "token ids") from None
