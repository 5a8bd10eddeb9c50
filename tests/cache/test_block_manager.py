"""Slots against a plain model that remembers which tokens each slot holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_transmuter.cache import BlockManager, CacheError, CacheIndex

TOKENS = st.lists(st.integers(0, 1), max_size=9)  # few ids, so that prompts begin alike


class BlockManagerMachine(RuleBasedStateMachine):
    """memory[slot] is the prefix whose last token's keys the slot holds, as a step and its copies leave it."""

    @initialize(block=st.integers(1, 3), blocks=st.integers(0, 8))
    def begin(self, block: int, blocks: int):
        self.slots = BlockManager(block * blocks, block)
        self.memory: dict[int, tuple] = {}
        self.sequences: dict[int, list] = {}
        self.first: dict[int, int] = {}  # of sequences whose beginning was dropped: how many slots of it
        self.kept: set[tuple] = set()
        self.unknown = 0

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)))

    def table(self, sequence: int) -> list[int]:
        return self.slots.table([sequence], max(1, len(self.sequences[sequence])))[0].tolist()

    def append_and_check(self, sequence: int, tokens: list, told: bool):
        """append, then the copies it asks for, then the step that stores the tokens."""
        had = self.sequences[sequence]
        before = (self.slots.free_slots, self.all_tables())
        refused = None
        try:
            copies = self.slots.append(sequence, tokens if told else len(tokens))
        except CacheError as error:
            refused = str(error)
        if refused is not None:
            assert f"{before[0]} of {self.slots.num_slots} free" in refused
            assert (self.slots.free_slots, self.all_tables()) == before
            assert len(tokens) > before[0] - 2 * self.slots.block_size
            return
        taken = {slot for other in self.sequences if other != sequence for slot in self.table(other) if slot >= 0}
        assert len(copies) < self.slots.block_size
        for source, target in copies:
            assert target not in taken
            self.memory[target] = self.memory[source]
        if not told:
            tokens = [("unknown", self.unknown + i) for i in range(len(tokens))]
            self.unknown += len(tokens)
        self.sequences[sequence] = had + tokens
        for position in range(len(had), len(had) + len(tokens)):
            slot = self.table(sequence)[position]
            assert slot not in taken, "a shared slot is never written"
            self.memory[slot] = tuple(self.sequences[sequence][: position + 1])

    def all_tables(self) -> dict[int, list[int]]:
        return {sequence: self.table(sequence) for sequence in self.sequences}

    @rule(prompt=TOKENS, stores=st.booleans())
    def open(self, prompt: list[int], stores: bool):
        before = self.slots.match_prefix(prompt)
        sequence, found = self.slots.open(prompt)
        assert found == before
        assert found % self.slots.block_size == 0
        assert found < max(1, len(prompt))
        assert found == 0 or tuple(prompt[:found]) in self.kept
        self.sequences[sequence] = prompt[:found]
        if stores:
            self.append_and_check(sequence, prompt[found:], told=True)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=TOKENS, told=st.booleans())
    def append(self, data, tokens: list[int], told: bool):
        self.append_and_check(self.pick(data), tokens, told)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data)
        length = data.draw(st.none() | st.integers(self.first.get(sequence, 0), len(self.sequences[sequence])))
        free = self.slots.free_slots
        forked = self.slots.fork(sequence, length)
        assert self.slots.free_slots == free, "nothing is copied"
        self.sequences[forked] = self.sequences[sequence][:length]
        self.first[forked] = self.first.get(sequence, 0)
        assert self.table(forked)[: len(self.sequences[forked])] == self.table(sequence)[: len(self.sequences[forked])]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def trim(self, data):
        sequence = self.pick(data)
        least = self.first.get(sequence, 0)
        length = data.draw(st.integers(least, len(self.sequences[sequence])))
        self.slots.truncate(sequence, length)
        del self.sequences[sequence][length:]
        if least:
            with pytest.raises(CacheError, match=f"at least {least}"):
                self.slots.truncate(sequence, least - 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data):
        """The slots of whole blocks before a position; those that others have stay theirs (no_slot_is_lost)."""
        sequence = self.pick(data)
        before = data.draw(st.integers(0, len(self.sequences[sequence])))
        had = self.table(sequence)
        self.slots.free_before(sequence, before)
        first = max(self.first.get(sequence, 0), before // self.slots.block_size * self.slots.block_size)
        self.first[sequence] = first
        assert self.slots.first_position(sequence) == first
        assert self.table(sequence) == [-1] * first + had[first:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), width=st.integers(1, 5))
    def ring(self, data, width: int):
        """The last columns of the table, position p at column p mod width."""
        sequence = self.pick(data)
        length, table = len(self.sequences[sequence]), self.table(sequence)
        wanted = [-1] * width
        for position in range(max(0, length - width), length):
            wanted[position % width] = table[position]
        assert self.slots.table([sequence], width, ring=True)[0].tolist() == wanted

    @precondition(lambda self: self.slots.block_size == 1 and len(self.sequences) > 1)
    @rule(data=st.data())
    def adopt(self, data):
        """A draft: its tokens at the places are stored for the sequence they now continue."""
        sequence, other = data.draw(st.permutations(sorted(self.sequences)))[:2]
        tokens, slots = self.sequences[other], self.table(other)
        places = data.draw(st.lists(st.integers(0, len(tokens) - 1), unique=True)) if tokens else []
        taken = {slot for third in self.sequences if third != other for slot in self.table(third)}
        findable = {slots[i] for i in places if any(tuple(tokens[: i + 1]) == prefix for prefix in self.kept)}
        try:
            self.slots.accept_draft(sequence, other, places)
        except CacheError:
            changed = False
        else:
            changed = True
        assert changed or findable or any(slots[i] in taken for i in places) or self.first.get(other)
        if not changed:
            return
        assert not any(slots[i] in taken for i in places), "a slot two sequences have stays at its column"
        for i in places:
            self.sequences[sequence] = [*self.sequences[sequence], tokens[i]]
            self.memory[slots[i]] = tuple(self.sequences[sequence])
        del self.sequences[other]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def keep(self, data):
        sequence = self.pick(data)
        if self.first.get(sequence):
            with pytest.raises(
                CacheError, match=r"BlockManager\.store_prefix: found a sequence without the slots of its first"
            ):
                self.slots.store_prefix(sequence)
            return
        self.slots.store_prefix(sequence)
        tokens = self.sequences[sequence]
        for end in range(self.slots.block_size, len(tokens) + 1, self.slots.block_size):
            if any(isinstance(t, tuple) for t in tokens[:end]):
                break
            self.kept.add(tuple(tokens[:end]))
        if not any(isinstance(t, tuple) for t in tokens):
            again, found = self.slots.open([*tokens, 0])
            assert found == len(tokens) // self.slots.block_size * self.slots.block_size, (
                "what was kept just now is found"
            )
            self.slots.free(again)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def look_up(self, data):
        """What is found still holds what it held when it was kept."""
        prefix = data.draw(st.sampled_from(sorted(self.kept)))
        sequence, found = self.slots.open([*prefix, 0])
        self.sequences[sequence] = list(prefix[:found])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.pick(data)
        self.slots.free(sequence)
        del self.sequences[sequence]
        with pytest.raises(CacheError, match="an open one"):
            self.slots.length(sequence)

    @rule(more=st.integers(0, 2))
    def grow(self, more: int):
        free = self.slots.free_slots
        self.slots.grow(self.slots.num_slots + more * self.slots.block_size)
        assert self.slots.free_slots == free + more * self.slots.block_size

    @invariant()
    def every_column_holds_its_own_prefix(self):
        """So a slot has two owners only at one column after the same tokens."""
        for sequence, tokens in getattr(self, "sequences", {}).items():
            assert self.slots.length(sequence) == len(tokens)
            first = self.first.get(sequence, 0)
            for position, slot in list(enumerate(self.table(sequence)[: len(tokens)]))[first:]:
                assert 0 <= slot < self.slots.num_slots
                held, wanted = self.memory[slot], tuple(tokens[: position + 1])
                assert held == wanted

    @rule()
    def copy(self):
        """What is kept, told to other slots, is found there as here, in blocks of the same tokens."""
        kept = self.slots.stored_blocks()
        assert len(kept) * self.slots.block_size == self.slots.stored_slots
        other = BlockManager(self.slots.stored_slots, self.slots.block_size)
        blocks = other.restore_blocks((before, tokens) for before, tokens, _ in kept)
        assert sorted(blocks) == list(range(len(kept)))
        assert other.free_slots == other.evictable_slots == other.num_slots
        for prefix in self.kept:
            found = other.match_prefix([*prefix, 0])
            assert found == self.slots.match_prefix([*prefix, 0])
            places = {block: place for place, (_, _, block) in enumerate(kept)}
            (mine, _), (theirs, _) = self.slots.open([*prefix, 0]), other.open([*prefix, 0])
            own, moved = self.slots.table([mine], max(found, 1))[0], other.table([theirs], max(found, 1))[0]
            for slot, there in zip(own[:found].tolist(), moved[:found].tolist(), strict=True):
                assert there == blocks[places[slot // other.block_size]] * other.block_size + slot % other.block_size
            self.slots.free(mine)
            other.free(theirs)

    @invariant()
    def no_slot_is_lost(self):
        """The blocks that no sequence has are those an append can get."""
        if not hasattr(self, "slots"):
            return
        owned = {slot // self.slots.block_size for table in self.all_tables().values() for slot in table if slot >= 0}
        assert len(owned) * self.slots.block_size + self.slots.free_slots == self.slots.num_slots


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestModel = BlockManagerMachine.TestCase


def store_prompt(slots: BlockManager, tokens: list[int]) -> int:
    """A prompt that ran: opened, appended and kept."""
    sequence, found = slots.open(tokens)
    slots.append(sequence, tokens[found:])
    slots.store_prefix(sequence)
    return sequence


def test_all_free_slots_can_be_had():
    """Also those of kept blocks, to the last."""
    slots = BlockManager(12, 3)
    slots.free(store_prompt(slots, list(range(7))))
    assert slots.free_slots == 12
    sequence, _ = slots.open()
    slots.append(sequence, 12)
    assert sorted(slots.table([sequence], 12)[0].tolist()) == list(range(12))
    assert slots.free_slots == 0


def test_a_full_pool_says_how_many_were_wanted_and_how_many_there_are():
    slots = BlockManager(8, 4)
    sequence, _ = slots.open()
    slots.append(sequence, 3)
    with pytest.raises(CacheError, match=r"8 slots needed and 4 of 8 free.*To fix it:.*grow the slots"):
        slots.append(sequence, [1] * 6)
    assert slots.length(sequence) == 3
    slots.grow(12)
    slots.append(sequence, [1] * 6)
    assert slots.length(sequence) == 9


def test_the_least_recently_used_prompt_goes_first_and_its_end_before_its_beginning():
    slots = BlockManager(8, 2)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    slots.free(store_prompt(slots, first))
    slots.free(store_prompt(slots, second))
    used, found = slots.open([*first, 0])  # ... and so the second is now the least recently used
    assert found == 4
    slots.free(used)
    other, _ = slots.open()
    slots.append(other, 2)
    assert [slots.open([*tokens, 0])[1] for tokens in (first, second)] == [4, 2]


def test_a_prompt_that_ran_again_in_slots_of_its_own_was_used_too():
    """Its last block is never found, so that its slots are others; those that are kept are as young as the rest."""
    slots = BlockManager(8, 2)
    first, second = [1, 2, 3, 4], [5, 6]
    slots.free(store_prompt(slots, first))
    slots.free(store_prompt(slots, second))
    slots.free(store_prompt(slots, first))
    other, _ = slots.open()
    slots.append(other, 4)
    assert [slots.match_prefix([*tokens, 0]) for tokens in (first, second)] == [4, 0]


def test_tokens_may_be_told_when_they_are_kept():
    slots = BlockManager(8, 2)
    sequence, _ = slots.open()
    slots.append(sequence, 5)
    slots.store_prefix(sequence)
    assert slots.stored_blocks() == []
    slots.store_prefix(sequence, [1, 2, 3])
    assert [slots.match_prefix(tokens) for tokens in ([1, 2, 3, 4, 5], [1, 2, 9], [1, 2], [2, 1, 3])] == [2, 2, 0, 0]
    slots.store_prefix(sequence, np.array([1, 2, 3, 4, 5]))
    assert slots.match_prefix([1, 2, 3, 4, 5]) == 4
    with pytest.raises(CacheError, match="at most the sequence's 5"):
        slots.store_prefix(sequence, [1] * 6)


@pytest.mark.parametrize(
    "kept",
    [
        [(0, [1, 2])],
        [(-1, [1, 2]), (1, [3, 4])],
        [(-2, [1, 2])],
        [(-1, [1])],
        [(-1, [1, 2, 3])],
        [(-1, [1, 2]), (-1, [1, 2])],
        [(-1, [1, 2]), (0, [1, 2]), (1, [1, 2]), (2, [1, 2])],
        [(-1, [1, 2]), (0, [3, "4"])],
    ],
)
def test_wrong_blocks_are_not_restored_and_none_of_them_stays(kept):
    slots = BlockManager(6, 2)
    with pytest.raises(CacheError, match=r"BlockManager\.restore_blocks"):
        slots.restore_blocks(kept)
    assert (slots.stored_blocks(), slots.free_slots, slots.evictable_slots) == ([], 6, 0)


def test_tokens_whose_hashes_collide_are_told_apart():
    """hash(2**61 - 1) is hash(0) in CPython: the tokens are compared, and so is the whole prefix before them."""
    big = 2**61 - 1
    assert hash((0, (0, 1))) == hash((0, (big, 1)))
    slots = BlockManager(16, 2)
    store_prompt(slots, [0, 1, 3, 4])
    assert slots.open([big, 1, 3, 4, 9])[1] == 0
    store_prompt(slots, [big, 1, 5, 6])
    assert slots.open([0, 1, 5, 6, 9])[1] == 2
    assert slots.open([big, 1, 5, 6, 9])[1] == 4


def test_blocks_after_a_forgotten_one_are_forgotten_with_it_and_may_be_kept_again():
    """Their prefix can't be found any more, so neither can they, though a sequence still has them."""
    slots = BlockManager(5)
    second, _ = slots.open()  # opened before the first is kept: it has a block of its own for the token they share
    first = store_prompt(slots, [1, 2])
    slots.append(second, [1, 3])
    slots.store_prefix(second)
    slots.free(first)
    other, _ = slots.open()
    slots.append(other, 3)  # takes the first's blocks, on whose first one the second's last was found
    assert slots.open([1, 3, 0])[1] == 0
    slots.store_prefix(second)
    assert slots.open([1, 3, 0])[1] == 2


def test_a_path_of_a_draft_is_adopted_in_its_slots():
    """Blocks of one; the rest of the draft is free, and what others share or may find is refused."""
    slots = BlockManager(8)
    sequence, draft = slots.open()[0], slots.open()[0]
    slots.append(sequence, [1, 2])
    slots.append(draft, [3, 4, 5])
    names = slots.table([draft], 3)[0].tolist()
    slots.accept_draft(sequence, draft, [0, 2])
    assert slots.table([sequence], 4)[0, 2:].tolist() == [names[0], names[2]]
    assert (slots.length(sequence), slots.free_slots) == (4, 4)
    with pytest.raises(CacheError, match="open one"):
        slots.length(draft)
    shared = slots.fork(sequence)
    kept = store_prompt(slots, [9])
    for other, places in ((shared, [0]), (kept, [0]), (sequence, [0]), (kept, [0, 0]), (kept, [1])):
        with pytest.raises(CacheError, match=r"BlockManager\.accept_draft"):
            slots.accept_draft(sequence, other, places)
    wide = BlockManager(4, 2)
    pair = wide.open()[0], wide.open()[0]
    with pytest.raises(CacheError, match="blocks of 2"):
        wide.accept_draft(*pair, [])


def test_a_kept_block_is_never_written():
    """Also not by the sequence it came from, alone in it, once that is trimmed into the block."""
    slots = BlockManager(16, 4)
    sequence = store_prompt(slots, [1, 2, 3, 4])
    before = slots.table([sequence], 4)[0]
    slots.truncate(sequence, 2)
    copies = slots.append(sequence, [7, 8])
    after = slots.table([sequence], 4)[0]
    assert copies == [(before[0], after[0]), (before[1], after[1])]
    assert not set(before) & set(after)


def test_a_fork_copies_only_a_partly_filled_block_and_only_when_it_is_written():
    slots = BlockManager(16, 4)
    sequence, _ = slots.open()
    slots.append(sequence, [1, 2, 3, 4, 5, 6])
    forks = [slots.fork(sequence) for _ in range(2)]
    assert slots.free_slots == 8
    old = slots.table([sequence], 6)[0]
    copies = slots.append(forks[0], [7])
    new = slots.table([forks[0]], 7)[0]
    assert copies == [(old[4], new[4]), (old[5], new[5])]
    assert new[:4].tolist() == old[:4].tolist()
    slots.free(sequence)
    assert slots.append(forks[1], [8]) == [], "the last of its owners writes where it is"
    slots = BlockManager(16, 1)
    sequence, _ = slots.open()
    slots.append(sequence, [1, 2, 3])
    forked = slots.fork(sequence)
    assert slots.append(sequence, [4]) == slots.append(forked, [5]) == [], "in blocks of one nothing is ever copied"


def test_a_table_is_what_an_index_takes():
    """int32, -1 after the tokens, a row of -1 for no sequence; a context too short is an error."""
    slots = BlockManager(6, 2)
    sequence, _ = slots.open()
    slots.append(sequence, [1, 2, 3])
    table = slots.table([sequence, None], 5)
    assert table.dtype == np.int32
    assert table.shape == (2, 5)
    assert table[1].tolist() == [-1] * 5
    assert table[0, 3:].tolist() == [-1, -1]
    assert CacheIndex.make([[2], [-1]], table).mask().sum().item() == 3
    with pytest.raises(CacheError, match="at least 3"):
        slots.table([sequence], 2)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda s: BlockManager(4, 0), "block"),
        (lambda s: BlockManager(5, 2), "multiple"),
        (lambda s: BlockManager(-1), "slots"),
        (lambda s: s.grow(2), "at least 4"),
        (lambda s: s.append(9, [1]), "open one"),
        (lambda s: s.fork(9), "open one"),
        (lambda s: s.free(9), "open one"),
        (lambda s: s.open([-1]), "tokens"),
        (lambda s: s.open(3), "token ids"),
        (lambda s: s.append(s.open()[0], -1), "tokens"),
        (lambda s: s.fork(s.open()[0], 1), "at most 0"),
        (lambda s: s.truncate(s.open()[0], 1), "at most 0"),
    ],
)
def test_a_wrong_argument_raises(act, says: str):
    with pytest.raises(CacheError, match=says):
        act(BlockManager(4, 2))
