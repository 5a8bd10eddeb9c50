"""PrefixStore: full blocks that later prompts share, found by the tokens up to their end (prefix sharing)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BlockTokens = tuple[int | None, ...]

# The number of the stored prefix before a block, and the block's tokens: together they name the whole prefix.
_PrefixKey = tuple[int, BlockTokens]


def empty_prefix(root: int) -> int:
    """Returns the number of the empty prefix of a root.

    root: 0, or more for keys and values that are others for the same tokens: prefixes of different roots share nothing.
    """
    return -root


class StoredBlock(NamedTuple):
    """A stored block: its tokens, its number, and the place in the list of the block before it; without one, -1 minus
    the root."""

    before: int
    tokens: BlockTokens
    number: int


class PrefixStore:
    """Which blocks hold which prefixes, and in which order those without a user are evicted.

    A block is found by its tokens and the stored prefix before it, so a match means that the whole prefix is the same:
    Python's dict hashes the pair and compares it, and the number of a prefix is never used twice. A block's key never
    changes. Eviction takes the least recently used block first, with the blocks that follow it, which nothing could
    find without it.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        # One look-up gives a block and the number of its prefix, so that `matching_blocks` is right in any thread.
        self._block_of_prefix: dict[_PrefixKey, tuple[int, int]] = {}
        self._prefix_of_block: dict[int, tuple[int, _PrefixKey]] = {}  # block → the number of its prefix, its key
        self._blocks_after: dict[int, set[int]] = {}  # number of a prefix → the stored blocks that follow
        self._last_prefix = 0
        self._evictable: OrderedDict[int, None] = OrderedDict()  # without a user, the least recently used first

    def __len__(self) -> int:
        return len(self._prefix_of_block)

    def __contains__(self, block: int) -> bool:
        return block in self._prefix_of_block

    @property
    def num_evictable(self) -> int:
        """The number of stored blocks without a user."""
        return len(self._evictable)

    def contains_any(self, blocks: Sequence[int]) -> bool:
        """Whether any of the blocks is stored."""
        return not self._prefix_of_block.keys().isdisjoint(blocks)

    def prefix(self, block: int) -> int:
        """The number of the prefix that a stored block ends."""
        return self._prefix_of_block[block][0]

    def find(self, prefix: int, tokens: BlockTokens) -> int | None:
        """The block that holds these tokens after the prefix of that number, or None."""
        block, _ = self._block_of_prefix.get((prefix, tokens), (None, None))
        return block

    def matching_blocks(self, prompt: Sequence[int | None], root: int = 0) -> Iterator[tuple[int, BlockTokens]]:
        """The stored blocks of a root with which the prompt begins, and their tokens; never that of its last token.

        Any thread may iterate while another stores and evicts: the number of a prefix is never used twice.
        """
        prefix = empty_prefix(root)
        for start in range(0, (len(prompt) - 1) // self.block_size * self.block_size, self.block_size):
            tokens = tuple(prompt[start : start + self.block_size])
            found = self._block_of_prefix.get((prefix, tokens))
            if found is None:
                return
            block, prefix = found
            yield block, tokens

    def add(self, prefix: int, tokens: BlockTokens, block: int) -> None:
        """Stores a block that has a user, of these tokens after the prefix of that number."""
        assert block not in self._prefix_of_block, "a stored block's key never changes"
        self._last_prefix += 1
        self._block_of_prefix[prefix, tokens] = block, self._last_prefix
        self._prefix_of_block[block] = (self._last_prefix, (prefix, tokens))
        self._blocks_after.setdefault(prefix, set()).add(block)

    def add_sequence(self, tokens: Sequence[int | None], blocks: Sequence[int], root: int = 0) -> None:
        """Stores the full blocks of a sequence under a root, up to the first token that is not known.

        A prefix that is stored already keeps its block, which counts as used now.
        """
        prefix, stored = empty_prefix(root), []
        for block, block_tokens in self._full_blocks(tokens, blocks):
            if None in block_tokens:
                break
            if self.find(prefix, block_tokens) is None:
                self.add(prefix, block_tokens, block)
            stored_block, prefix = self._block_of_prefix[prefix, block_tokens]
            stored.append(stored_block)
        for block in reversed(stored):
            if block in self._evictable:
                self._evictable.move_to_end(block)

    def stored_blocks(self) -> list[StoredBlock]:
        """Every stored block, each after the block that it follows."""
        blocks = sorted(self._prefix_of_block, key=self.prefix)  # a block's number is greater than its predecessor's
        place_of_prefix = {self.prefix(block): place for place, block in enumerate(blocks)}
        keys = [self._prefix_of_block[block][1] for block in blocks]
        return [
            StoredBlock(place_of_prefix.get(prefix, prefix - 1), tokens, block)
            for block, (prefix, tokens) in zip(blocks, keys, strict=True)
        ]

    def mark_used(self, block: int) -> None:
        """The block has a user again."""
        self._evictable.pop(block, None)

    def mark_unused(self, block: int) -> None:
        """The stored block has no user any more: the last to be evicted of those there are."""
        self._evictable[block] = None

    def evict_oldest(self) -> list[int]:
        """Evicts the least recently used block; returns the blocks that are free now."""
        return self.evict(next(iter(self._evictable)))

    def evict(self, block: int) -> list[int]:
        """Removes a block and those that follow it; returns those of them that have no user."""
        removed, free = [block], []
        while removed:
            block = removed.pop()
            number, key = self._prefix_of_block.pop(block)
            del self._block_of_prefix[key]
            removed += self._blocks_after.pop(number, ())
            self._remove_from_siblings(block, key[0])
            if block in self._evictable:
                del self._evictable[block]
                free.append(block)
        return free

    def _remove_from_siblings(self, block: int, prefix: int) -> None:
        siblings = self._blocks_after.get(prefix)
        if siblings is not None:
            siblings.discard(block)
            if not siblings:
                del self._blocks_after[prefix]

    def _full_blocks(self, tokens: Sequence[int | None], blocks: Sequence[int]) -> Iterator[tuple[int, BlockTokens]]:
        for place, block in enumerate(blocks[: len(tokens) // self.block_size]):
            yield block, tuple(tokens[place * self.block_size : (place + 1) * self.block_size])
