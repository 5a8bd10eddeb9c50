"""BlockManager: which sequence owns which slots of the pools, on the host: blocks, reference counts, slot tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_transmuter.cache.arguments import check_integer, check_token_ids
from mlx_transmuter.cache.errors import CacheError
from mlx_transmuter.cache.layout import ceil_div, ring_column, slots_of_blocks
from mlx_transmuter.cache.prefix_store import PrefixStore, StoredBlock, empty_prefix


@dataclass
class _SequenceBlocks:
    tokens: list[int | None] = field(default_factory=list)  # None: a token whose id is not known
    num_dropped_blocks: int = 0
    block_buffer: np.ndarray = field(default_factory=lambda: np.empty(64, np.int32))
    num_blocks: int = 0

    @property
    def blocks(self) -> np.ndarray:
        """The blocks, from the first that was not dropped, int32: a view, for a table needs an array at every step."""
        return self.block_buffer[: self.num_blocks]

    def add_blocks(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Adds blocks after the last."""
        count = self.num_blocks + len(blocks)
        if count > len(self.block_buffer):
            self.block_buffer = np.concatenate([self.blocks, np.empty(2 * count, np.int32)])
        self.block_buffer[self.num_blocks : count] = blocks
        self.num_blocks = count


class BlockManager:
    """Gives the slots of the pools to sequences in blocks of block_size slots, and makes the tables of CacheIndex.make.

    A sequence owns as many blocks as its tokens need, in the order of their positions. Reference counts let forks, and
    prompts with the same prefix, share blocks. A shared block is never written: a sequence whose last block is shared
    and partly filled gets a block of its own at its next append, which returns the slots to copy.

        sequence, stored = manager.open(prompt)        # stored: tokens whose keys and values are in the pools already
        copies = manager.append(sequence, prompt[stored:])
        table = manager.table([sequence], context)     # ... the step that stores the tokens runs ...
        manager.store_prefix(sequence)                 # from now on other prompts share its full blocks
        manager.free(sequence)

    Stored blocks without a user stay until their slots are needed; see PrefixStore.

    num_slots: the slots of the pools, a multiple of block_size. Raises CacheError, as every method does, for a wrong
    argument.
    """

    def __init__(self, num_slots: int, block_size: int = 1):
        self.block_size = check_integer("BlockManager: block_size", block_size, 1)
        self._ref_counts = np.zeros(0, np.int32)
        self._free_blocks: list[int] = []
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._last_sequence = 0
        self._prefixes = PrefixStore(self.block_size)
        self.grow(num_slots)

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return len(self._ref_counts) * self.block_size

    @property
    def free_slots(self) -> int:
        """The number of slots that an append can still get: those without an owner, and those of evictable blocks."""
        return (len(self._free_blocks) + self._prefixes.num_evictable) * self.block_size

    @property
    def stored_slots(self) -> int:
        """The number of slots of stored blocks."""
        return len(self._prefixes) * self.block_size

    @property
    def evictable_slots(self) -> int:
        """The number of slots of stored blocks without a user."""
        return self._prefixes.num_evictable * self.block_size

    # Sequences

    def open(self, tokens: Iterable[int] = (), root: int = 0) -> tuple[int, int]:
        """Returns (sequence, n): a new sequence that begins with the first n tokens, whose blocks are stored.

        n counts whole blocks and never the last token, so that a step has a token to run. root: see empty_prefix.
        """
        opened = _SequenceBlocks()
        for block, block_tokens in self._prefixes.matching_blocks(check_token_ids("BlockManager.open", tokens), root):
            self._ref_counts[block] += 1
            self._prefixes.mark_used(block)
            opened.add_blocks([block])
            opened.tokens += block_tokens
        return self._register(opened), len(opened.tokens)

    def length(self, sequence: int) -> int:
        """The number of tokens of the sequence."""
        return len(self._sequence("length", sequence).tokens)

    def first_position(self, sequence: int) -> int:
        """The first position of the sequence that has a slot; its length where none has."""
        return self._first_position(self._sequence("first_position", sequence))

    def slots_to_append(self, sequences: Sequence[int], counts: Sequence[int]) -> int:
        """The free slots that appends of counts[r] tokens to each of these sequences, all different, will take.

        They are those of the new blocks, and of the copies of last blocks that are shared and partly filled: where only
        these sequences share a block, the last of them keeps it.
        """
        num_blocks = 0
        last_blocks: Counter[int] = Counter()
        for sequence, count in zip(sequences, counts, strict=True):
            owner = self._sequence("slots_to_append", sequence)
            length = len(owner.tokens)
            num_blocks += ceil_div(length + count, self.block_size) - ceil_div(length, self.block_size)
            if count and length % self.block_size:
                last_blocks[int(owner.blocks[-1])] += 1
        for block, num_writers in last_blocks.items():
            num_blocks += num_writers - (num_writers == self._ref_counts[block] and block not in self._prefixes)
        return num_blocks * self.block_size

    def slots_to_free(self, sequences: Sequence[int]) -> int:
        """The slots that an append can get once these sequences, all different, are freed, and cannot yet."""
        owned = [self._sequence("slots_to_free", sequence).blocks for sequence in sequences]
        blocks, users = np.unique(np.concatenate([np.empty(0, np.int32), *owned]), return_counts=True)
        return int((users == self._ref_counts[blocks]).sum()) * self.block_size

    def append(self, sequence: int, tokens: Iterable[int] | int) -> list[tuple[int, int]]:
        """Gives slots to more tokens; returns the copies (from slot, to slot) to make before the step that runs them.

        tokens: their ids, or their number only (store_prefix can name them later). Copies are needed where the last
        block is partly filled and shared. Raises CacheError, and changes nothing, when there are too few free slots.
        """
        target = self._sequence("append", sequence)
        new_tokens = _new_tokens(tokens)
        filled = len(target.tokens) % self.block_size
        copies_last_block = bool(new_tokens and filled) and self._is_shared(target.blocks[-1:])
        length = len(target.tokens) + len(new_tokens)
        num_new = ceil_div(length, self.block_size) - target.num_dropped_blocks - target.num_blocks
        self._check_free((num_new + copies_last_block) * self.block_size)
        copies = self._unshare_last_block(target, filled) if copies_last_block else []
        target.add_blocks([self._allocate_block() for _ in range(num_new)])
        target.tokens += new_tokens
        return copies

    def fork(self, sequence: int, num_tokens: int | None = None) -> int:
        """Returns a new sequence of the first num_tokens tokens (default: all), in the same slots, without a copy."""
        parent = self._sequence("fork", sequence)
        num_tokens = len(parent.tokens) if num_tokens is None else self._checked_length("fork", parent, num_tokens)
        forked = _SequenceBlocks(parent.tokens[:num_tokens], parent.num_dropped_blocks)
        forked.add_blocks(parent.blocks[: ceil_div(num_tokens, self.block_size) - parent.num_dropped_blocks])
        self._ref_counts[forked.blocks] += 1  # they have a user already, so none is evictable
        return self._register(forked)

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Removes the tokens of the sequence after the first num_tokens, and their slots."""
        truncated = self._sequence("truncate", sequence)
        num_tokens = self._checked_length("truncate", truncated, num_tokens)
        num_blocks = ceil_div(num_tokens, self.block_size) - truncated.num_dropped_blocks
        self._release_blocks(truncated.blocks[num_blocks:])
        truncated.num_blocks = num_blocks
        del truncated.tokens[num_tokens:]

    def free_before(self, sequence: int, position: int) -> None:
        """Frees the whole blocks of the sequence before a position: no later token may attend to them.

        The sequence can still be continued and forked, but not be stored or truncated to before the position.
        """
        shortened = self._sequence("free_before", sequence)
        position = check_integer("BlockManager.free_before: position", position, 0, len(shortened.tokens))
        count = position // self.block_size - shortened.num_dropped_blocks
        if count > 0:
            self._release_blocks(shortened.blocks[:count])
            shortened.block_buffer = shortened.block_buffer[count:]
            shortened.num_blocks -= count
            shortened.num_dropped_blocks += count

    def free(self, sequence: int) -> None:
        """Ends the sequence. Its slots are free, except those of stored blocks, which stay until they are evicted."""
        self._release_blocks(self._sequence("free", sequence).blocks)
        del self._sequences[sequence]

    def accept_draft(self, sequence: int, draft: int, accepted: Sequence[int]) -> None:
        """Ends the sequence `draft`; its tokens at the positions `accepted` become the next tokens of `sequence`, in
        their slots.

        So nothing is copied for a path through a draft tree. Raises CacheError for blocks of more than one slot, whose
        positions are fixed, for positions outside the draft or twice, for slots that are shared or stored, and for a
        draft that had blocks freed.
        """
        target, source = self._sequence("accept_draft", sequence), self._sequence("accept_draft", draft)
        where, last = "BlockManager.accept_draft", len(source.tokens) - 1
        accepted = [check_integer(f"{where}: accepted", position, 0, last) for position in accepted]
        is_repeated = sequence == draft or len(set(accepted)) != len(accepted)
        if self.block_size != 1 or is_repeated or source.num_dropped_blocks:
            found = f"blocks of {self.block_size} and positions {accepted} of sequence {draft}"
            raise CacheError(where, found, "blocks of 1, and each position of another sequence once")
        if self._is_shared(source.blocks[accepted]):
            raise CacheError(where, "slots that another sequence shares", "slots of the sequence alone")
        target.tokens += [source.tokens[position] for position in accepted]
        target.add_blocks(source.blocks[accepted])
        self._release_blocks(np.delete(source.blocks, accepted))
        del self._sequences[draft]

    def grow(self, num_slots: int) -> None:
        """Sets the number of slots, not below the present one; grow the pools too."""
        num_slots = check_integer("BlockManager: num_slots", num_slots, self.num_slots)
        if num_slots % self.block_size:
            raise CacheError("BlockManager: num_slots", num_slots, f"a multiple of the block of {self.block_size}")
        new_blocks = range(len(self._ref_counts), num_slots // self.block_size)
        self._ref_counts = np.concatenate([self._ref_counts, np.zeros(len(new_blocks), np.int32)])
        self._free_blocks[:0] = reversed(new_blocks)

    # Prefix sharing

    def match_prefix(self, tokens: Iterable[int], root: int = 0) -> int:
        """The number of first tokens that `open` would share. Changes nothing, not even what counts as used."""
        prompt = check_token_ids("BlockManager.match_prefix", tokens)
        return sum(len(block_tokens) for _, block_tokens in self._prefixes.matching_blocks(prompt, root))

    def store_prefix(self, sequence: int, tokens: Iterable[int] | None = None, root: int = 0) -> None:
        """Lets later prompts share the full blocks of this sequence: call it once a step has stored their tokens.

        tokens: the ids of its first tokens, where `append` got their number only. root: see empty_prefix. Raises
        CacheError for more tokens than the sequence has, and for a sequence whose first blocks were freed.
        """
        stored = self._sequence("store_prefix", sequence)
        if stored.num_dropped_blocks:
            found = f"a sequence without the slots of its first {self._first_position(stored)} tokens"
            raise CacheError("BlockManager.store_prefix", found, "one that has all of them")
        if tokens is not None:
            ids = check_token_ids("BlockManager.store_prefix", tokens)
            if len(ids) > len(stored.tokens):
                expected = f"at most the sequence's {len(stored.tokens)}"
                raise CacheError("BlockManager.store_prefix: tokens", f"{len(ids)}", expected)
            stored.tokens[: len(ids)] = ids
        self._prefixes.add_sequence(stored.tokens, stored.blocks.tolist(), root)

    def stored_blocks(self) -> list[StoredBlock]:
        """Every stored block, each after the block that it follows."""
        return self._prefixes.stored_blocks()

    def restore_blocks(self, prefix_blocks: Iterable[tuple[int, Sequence[int]]], roots: int = 1) -> list[int]:
        """Stores blocks (before, tokens), as stored_blocks lists them, in free slots; returns the blocks.

        Fill their slots next. roots: how many there may be. Raises CacheError, and stores none of them, for a block
        that comes before the one it follows, is stored already, is not full, or finds no free slots.
        """
        where, blocks = "BlockManager.restore_blocks", []
        try:
            for before, tokens in prefix_blocks:
                before = check_integer(f"{where}: before", before, -roots, len(blocks) - 1)
                block_tokens = tuple(check_token_ids(where, tokens))
                prefix = empty_prefix(-1 - before) if before < 0 else self._prefixes.prefix(blocks[before])
                is_stored = self._prefixes.find(prefix, block_tokens) is not None
                if len(block_tokens) != self.block_size or is_stored or not self._free_blocks:
                    raise CacheError(where, f"block {len(blocks)}", "a full block, stored once, and free slots")
                block = self._allocate_block()
                self._prefixes.add(prefix, block_tokens, block)
                blocks.append(block)
        except CacheError:
            for block in reversed(blocks):
                self._prefixes.evict(block)
                self._release_blocks([block])
            raise
        self._release_blocks(blocks)
        return blocks

    # Slots

    def table(self, sequences: Sequence[int | None], context: int, *, ring: bool = False) -> np.ndarray:
        """The slot table int32 [rows, context] of CacheIndex.make: the slots of each sequence's tokens, then -1; None:
        all -1. It maps positions to slots, where a block table in vLLM's terms maps them to blocks.

        ring: for CacheIndex.as_ring, of the last `context` tokens, position p at column p mod context.
        """
        context = check_integer("BlockManager.table: context", context, 1)
        table = np.full((len(sequences), context), -1, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            if sequence is None:
                continue
            owner = self._sequence("table", sequence)
            length = len(owner.tokens)
            if length > context and not ring:
                expected = f"at least {length}, the length of sequence {sequence}"
                raise CacheError("BlockManager.table: context", context, expected)
            first = max(self._first_position(owner), length - context)
            columns = slice(first, length) if length <= context else ring_column(np.arange(first, length), context)
            row[columns] = self._slots_of(owner, first, length)
        return table

    def slots_of(self, sequence: int, first: int, last: int) -> np.ndarray:
        """The slots of the positions from first to before last of a sequence, int32 [last - first]."""
        owner = self._sequence("slots_of", sequence)
        last = check_integer("BlockManager.slots_of: last", last, 0, len(owner.tokens))
        first = check_integer("BlockManager.slots_of: first", first, self._first_position(owner), last)
        return self._slots_of(owner, first, last)

    def _slots_of(self, owner: _SequenceBlocks, first: int, last: int) -> np.ndarray:
        first_block = first // self.block_size
        end_block = ceil_div(last, self.block_size)
        blocks = owner.blocks[first_block - owner.num_dropped_blocks : end_block - owner.num_dropped_blocks]
        start = first_block * self.block_size
        return slots_of_blocks(blocks, self.block_size)[first - start : last - start]

    def _first_position(self, owner: _SequenceBlocks) -> int:
        return owner.num_dropped_blocks * self.block_size

    def _sequence(self, method: str, sequence: int) -> _SequenceBlocks:
        if sequence not in self._sequences:
            expected = f"an open one, of {sorted(self._sequences)}"
            raise CacheError(f"BlockManager.{method}: sequence", repr(sequence), expected)
        return self._sequences[sequence]

    def _checked_length(self, method: str, owner: _SequenceBlocks, num_tokens: int) -> int:
        where = f"BlockManager.{method}: num_tokens"
        return check_integer(where, num_tokens, self._first_position(owner), len(owner.tokens))

    def _register(self, sequence: _SequenceBlocks) -> int:
        self._last_sequence += 1
        self._sequences[self._last_sequence] = sequence
        return self._last_sequence

    # Blocks

    def _is_shared(self, blocks: np.ndarray) -> bool:
        """Whether any of the blocks, which have a user, has another one or is stored, so that it can get one."""
        return bool((self._ref_counts[blocks] > 1).any()) or self._prefixes.contains_any(blocks.tolist())

    def _check_free(self, num_slots: int) -> None:
        if num_slots > self.free_slots:
            found = f"{num_slots} slots needed and {self.free_slots} of {self.num_slots} free"
            do = "Free a sequence, or grow the slots and with them the pools."
            raise CacheError("BlockManager.append", found, f"at most {self.free_slots} needed", do)

    def _unshare_last_block(self, owner: _SequenceBlocks, filled: int) -> list[tuple[int, int]]:
        """Replaces the last block, of which `filled` slots are used, by one of the sequence's own; returns the copies
        (from slot, to slot)."""
        old, new = int(owner.blocks[-1]), self._allocate_block()
        owner.blocks[-1] = new
        self._release_blocks([old])
        sources, targets = (slots_of_blocks([block], self.block_size)[:filled].tolist() for block in (old, new))
        return list(zip(sources, targets, strict=True))

    def _allocate_block(self) -> int:
        """A block for one sequence alone: a free one, or else the least recently used of the evictable ones."""
        if not self._free_blocks:
            self._free_blocks += self._prefixes.evict_oldest()
        block = self._free_blocks.pop()
        self._ref_counts[block] = 1
        return block

    def _release_blocks(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Removes one user of each of these blocks, all different."""
        blocks = np.asarray(blocks, np.int32)
        self._ref_counts[blocks] -= 1
        # The end of a prefix is of no use without its beginning: it is evicted first.
        for block in blocks[self._ref_counts[blocks] == 0][::-1].tolist():
            if block in self._prefixes:
                self._prefixes.mark_unused(block)
            else:
                self._free_blocks.append(block)


def _new_tokens(tokens: Iterable[int] | int) -> list[int | None]:
    """The ids of the tokens of an append; None for each where only their number is known."""
    if isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool):
        return [None] * check_integer("BlockManager.append: tokens", tokens, 0)
    return check_token_ids("BlockManager.append", tokens)
