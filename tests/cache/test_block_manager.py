"""BlockManager, against a plain model that remembers which tokens each slot holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_transmuter.cache import BlockManager, CacheError, CacheIndex
from mlx_transmuter.cache.layout import slots_of_blocks

TOKENS = st.lists(st.integers(0, 1), max_size=9)  # few ids, so that prompts have common prefixes


class BlockManagerMachine(RuleBasedStateMachine):
    """slot_prefixes[slot] is the prefix whose last token's keys the slot holds after the steps and copies so far."""

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(0, 8))
    def begin(self, block_size: int, num_blocks: int):
        self.manager = BlockManager(block_size * num_blocks, block_size)
        self.slot_prefixes: dict[int, tuple] = {}
        self.tokens: dict[int, list] = {}  # of each sequence
        self.first_positions: dict[int, int] = {}  # of sequences whose first blocks were freed
        self.stored_prefixes: set[tuple] = set()
        self.num_unknown = 0

    def draw_sequence(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def table(self, sequence: int) -> list[int]:
        return self.manager.table([sequence], max(1, len(self.tokens[sequence])))[0].tolist()

    def all_tables(self) -> dict[int, list[int]]:
        return {sequence: self.table(sequence) for sequence in self.tokens}

    def slots_of_others(self, sequence: int) -> set[int]:
        return {slot for other in self.tokens if other != sequence for slot in self.table(other) if slot >= 0}

    def append_and_check(self, sequence: int, tokens: list, known: bool):
        """Appends, makes the copies that append returns, then stores the tokens as a step does."""
        length = len(self.tokens[sequence])
        free, tables = self.manager.free_slots, self.all_tables()
        try:
            copies = self.manager.append(sequence, tokens if known else len(tokens))
        except CacheError as error:
            message = str(error)
        else:
            message = None
        if message is not None:
            assert f"{free} of {self.manager.num_slots} free" in message
            assert (self.manager.free_slots, self.all_tables()) == (free, tables)
            assert len(tokens) > free - 2 * self.manager.block_size
            return
        others = self.slots_of_others(sequence)
        assert len(copies) < self.manager.block_size
        for source, target in copies:
            assert target not in others
            self.slot_prefixes[target] = self.slot_prefixes[source]
        if not known:
            tokens = [("unknown", self.num_unknown + i) for i in range(len(tokens))]
            self.num_unknown += len(tokens)
        self.tokens[sequence] = self.tokens[sequence] + tokens
        for position in range(length, length + len(tokens)):
            slot = self.table(sequence)[position]
            assert slot not in others, "a shared slot is never written"
            self.slot_prefixes[slot] = tuple(self.tokens[sequence][: position + 1])

    @rule(prompt=TOKENS, runs=st.booleans())
    def open(self, prompt: list[int], runs: bool):
        matched = self.manager.match_prefix(prompt)
        sequence, stored = self.manager.open(prompt)
        assert stored == matched
        assert stored % self.manager.block_size == 0
        assert stored < max(1, len(prompt))
        assert stored == 0 or tuple(prompt[:stored]) in self.stored_prefixes
        self.tokens[sequence] = prompt[:stored]
        if runs:
            self.append_and_check(sequence, prompt[stored:], known=True)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=TOKENS, known=st.booleans())
    def append(self, data, tokens: list[int], known: bool):
        self.append_and_check(self.draw_sequence(data), tokens, known)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.draw_sequence(data)
        first = self.first_positions.get(sequence, 0)
        length = data.draw(st.none() | st.integers(first, len(self.tokens[sequence])))
        free = self.manager.free_slots
        forked = self.manager.fork(sequence, length)
        assert self.manager.free_slots == free, "nothing is copied"
        self.tokens[forked] = self.tokens[sequence][:length]
        self.first_positions[forked] = first
        count = len(self.tokens[forked])
        assert self.table(forked)[:count] == self.table(sequence)[:count]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.draw_sequence(data)
        first = self.first_positions.get(sequence, 0)
        length = data.draw(st.integers(first, len(self.tokens[sequence])))
        self.manager.truncate(sequence, length)
        del self.tokens[sequence][length:]
        if first:
            with pytest.raises(CacheError, match=f"at least {first}"):
                self.manager.truncate(sequence, first - 1)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free_before(self, data):
        """Frees the whole blocks before a position; shared ones stay with the other sequences (no_slot_is_lost)."""
        sequence = self.draw_sequence(data)
        position = data.draw(st.integers(0, len(self.tokens[sequence])))
        table = self.table(sequence)
        self.manager.free_before(sequence, position)
        block_size = self.manager.block_size
        first = max(self.first_positions.get(sequence, 0), position // block_size * block_size)
        self.first_positions[sequence] = first
        assert self.manager.first_position(sequence) == first
        assert self.table(sequence) == [-1] * first + table[first:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), width=st.integers(1, 5))
    def ring_table(self, data, width: int):
        """The last columns of the table, position p at column p mod width."""
        sequence = self.draw_sequence(data)
        length, table = len(self.tokens[sequence]), self.table(sequence)
        expected = [-1] * width
        for position in range(max(0, length - width), length):
            expected[position % width] = table[position]
        assert self.manager.table([sequence], width, ring=True)[0].tolist() == expected

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def slots_of(self, data):
        sequence = self.draw_sequence(data)
        length, first = len(self.tokens[sequence]), self.first_positions.get(sequence, 0)
        start = data.draw(st.integers(first, length))
        stop = data.draw(st.integers(start, length))
        assert self.manager.slots_of(sequence, start, stop).tolist() == self.table(sequence)[start:stop]
        for positions in ((start, length + 1), (first - 1, length), (length, start - 1)):
            with pytest.raises(CacheError, match=r"BlockManager\.slots_of"):
                self.manager.slots_of(sequence, *positions)

    @precondition(lambda self: self.manager.block_size == 1 and len(self.tokens) > 1)
    @rule(data=st.data())
    def accept_draft(self, data):
        """The accepted tokens of a draft are in the slots of the sequence that they now continue."""
        sequence, draft = data.draw(st.permutations(sorted(self.tokens)))[:2]
        tokens, slots = self.tokens[draft], self.table(draft)
        accepted = data.draw(st.lists(st.integers(0, len(tokens) - 1), unique=True)) if tokens else []
        others = self.slots_of_others(draft)
        stored = {slots[i] for i in accepted if any(tuple(tokens[: i + 1]) == p for p in self.stored_prefixes)}
        is_shared = any(slots[i] in others for i in accepted)
        try:
            self.manager.accept_draft(sequence, draft, accepted)
        except CacheError:
            assert stored or is_shared or self.first_positions.get(draft)
            return
        assert not is_shared, "a slot of two sequences stays at its column"
        for i in accepted:
            self.tokens[sequence] = [*self.tokens[sequence], tokens[i]]
            self.slot_prefixes[slots[i]] = tuple(self.tokens[sequence])
        del self.tokens[draft]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def store_prefix(self, data):
        sequence = self.draw_sequence(data)
        if self.first_positions.get(sequence):
            message = r"BlockManager\.store_prefix: found a sequence without the slots of its first"
            with pytest.raises(CacheError, match=message):
                self.manager.store_prefix(sequence)
            return
        self.manager.store_prefix(sequence)
        tokens, block_size = self.tokens[sequence], self.manager.block_size
        for end in range(block_size, len(tokens) + 1, block_size):
            if any(isinstance(token, tuple) for token in tokens[:end]):
                break
            self.stored_prefixes.add(tuple(tokens[:end]))
        if not any(isinstance(token, tuple) for token in tokens):
            other, stored = self.manager.open([*tokens, 0])
            assert stored == len(tokens) // block_size * block_size, "a prefix that was just stored is found"
            self.manager.free(other)

    @precondition(lambda self: self.stored_prefixes)
    @rule(data=st.data())
    def open_stored_prefix(self, data):
        """The slots of a stored prefix still hold what they held when it was stored."""
        prefix = data.draw(st.sampled_from(sorted(self.stored_prefixes)))
        sequence, stored = self.manager.open([*prefix, 0])
        self.tokens[sequence] = list(prefix[:stored])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.draw_sequence(data)
        self.manager.free(sequence)
        del self.tokens[sequence]
        with pytest.raises(CacheError, match="an open one"):
            self.manager.length(sequence)

    @rule(num_blocks=st.integers(0, 2))
    def grow(self, num_blocks: int):
        free, num_slots = self.manager.free_slots, num_blocks * self.manager.block_size
        self.manager.grow(self.manager.num_slots + num_slots)
        assert self.manager.free_slots == free + num_slots

    @rule()
    def restore_blocks(self):
        """The stored blocks, restored in another manager, are found there as here, with the same tokens."""
        stored, block_size = self.manager.stored_blocks(), self.manager.block_size
        assert len(stored) * block_size == self.manager.stored_slots
        other = BlockManager(self.manager.stored_slots, block_size)
        blocks = other.restore_blocks((block.before, block.tokens) for block in stored)
        assert sorted(blocks) == list(range(len(stored)))
        assert other.free_slots == other.evictable_slots == other.num_slots
        restored_as = {block.number: restored for block, restored in zip(stored, blocks, strict=True)}
        for prefix in self.stored_prefixes:
            length = other.match_prefix([*prefix, 0])
            assert length == self.manager.match_prefix([*prefix, 0])
            (sequence, _), (restored, _) = self.manager.open([*prefix, 0]), other.open([*prefix, 0])
            own_blocks = (self.manager.slots_of(sequence, 0, length)[::block_size] // block_size).tolist()
            expected = slots_of_blocks([restored_as[block] for block in own_blocks], block_size)
            assert other.slots_of(restored, 0, length).tolist() == expected.tolist()
            self.manager.free(sequence)
            other.free(restored)

    @invariant()
    def every_column_holds_its_own_prefix(self):
        """So a slot has two owners only at one column after the same tokens."""
        for sequence, tokens in getattr(self, "tokens", {}).items():
            assert self.manager.length(sequence) == len(tokens)
            first = self.first_positions.get(sequence, 0)
            for position, slot in list(enumerate(self.table(sequence)[: len(tokens)]))[first:]:
                assert 0 <= slot < self.manager.num_slots
                assert self.slot_prefixes[slot] == tuple(tokens[: position + 1])

    @invariant()
    def no_slot_is_lost(self):
        """The blocks that no sequence owns are those an append can get."""
        if not hasattr(self, "manager"):
            return
        block_size = self.manager.block_size
        owned = {slot // block_size for table in self.all_tables().values() for slot in table if slot >= 0}
        assert len(owned) * block_size + self.manager.free_slots == self.manager.num_slots


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestModel = BlockManagerMachine.TestCase


def test_too_few_free_slots_raise_an_error_with_both_numbers():
    manager = BlockManager(8, 4)
    sequence, _ = manager.open()
    manager.append(sequence, 3)
    with pytest.raises(CacheError, match=r"8 slots needed and 4 of 8 free.*To fix it:.*grow the slots"):
        manager.append(sequence, [1] * 6)
    assert manager.length(sequence) == 3
    manager.grow(12)
    manager.append(sequence, [1] * 6)
    assert manager.length(sequence) == 9


def test_the_accepted_path_of_a_draft_stays_in_its_slots():
    """In blocks of one slot; the draft's other slots are free, and shared or stored slots are refused."""
    manager = BlockManager(8)
    sequence, draft = manager.open()[0], manager.open()[0]
    manager.append(sequence, [1, 2])
    manager.append(draft, [3, 4, 5])
    slots = manager.slots_of(draft, 0, 3).tolist()
    manager.accept_draft(sequence, draft, [0, 2])
    assert manager.table([sequence], 4)[0, 2:].tolist() == [slots[0], slots[2]]
    assert (manager.length(sequence), manager.free_slots) == (4, 4)
    with pytest.raises(CacheError, match="open one"):
        manager.length(draft)
    fork = manager.fork(sequence)
    stored, _ = manager.open([9])
    manager.append(stored, [9])
    manager.store_prefix(stored)
    for other, positions in ((fork, [0]), (stored, [0]), (sequence, [0]), (stored, [0, 0]), (stored, [1])):
        with pytest.raises(CacheError, match=r"BlockManager\.accept_draft"):
            manager.accept_draft(sequence, other, positions)
    manager = BlockManager(4, 2)
    sequence, draft = manager.open()[0], manager.open()[0]
    with pytest.raises(CacheError, match="blocks of 2"):
        manager.accept_draft(sequence, draft, [])


def test_a_fork_copies_a_partly_filled_block_only_when_it_writes_to_it():
    manager = BlockManager(16, 4)
    sequence, _ = manager.open()
    manager.append(sequence, [1, 2, 3, 4, 5, 6])
    forks = [manager.fork(sequence) for _ in range(2)]
    assert manager.free_slots == 8
    old = manager.table([sequence], 6)[0]
    copies = manager.append(forks[0], [7])
    new = manager.table([forks[0]], 7)[0]
    assert copies == [(old[4], new[4]), (old[5], new[5])]
    assert new[:4].tolist() == old[:4].tolist()
    manager.free(sequence)
    assert manager.append(forks[1], [8]) == [], "the last owner writes in place"
    manager = BlockManager(16, 1)
    sequence, _ = manager.open()
    manager.append(sequence, [1, 2, 3])
    fork = manager.fork(sequence)
    assert manager.append(sequence, [4]) == manager.append(fork, [5]) == [], "in blocks of one nothing is ever copied"


def test_a_table_is_an_argument_of_an_index():
    """int32, -1 after the tokens, a row of -1 for no sequence; a context below a length is an error."""
    manager = BlockManager(6, 2)
    sequence, _ = manager.open()
    manager.append(sequence, [1, 2, 3])
    table = manager.table([sequence, None], 5)
    assert table.dtype == np.int32
    assert table.shape == (2, 5)
    assert table[1].tolist() == [-1] * 5
    assert table[0, 3:].tolist() == [-1, -1]
    assert CacheIndex.make([[2], [-1]], table).mask().sum().item() == 3
    with pytest.raises(CacheError, match="at least 3"):
        manager.table([sequence], 2)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda manager: BlockManager(4, 0), "block_size"),
        (lambda manager: BlockManager(5, 2), "multiple"),
        (lambda manager: BlockManager(-1), "num_slots"),
        (lambda manager: manager.grow(2), "at least 4"),
        (lambda manager: manager.append(9, [1]), "open one"),
        (lambda manager: manager.fork(9), "open one"),
        (lambda manager: manager.free(9), "open one"),
        (lambda manager: manager.open([-1]), "tokens"),
        (lambda manager: manager.open(3), "token ids"),
        (lambda manager: manager.append(manager.open()[0], -1), "tokens"),
        (lambda manager: manager.fork(manager.open()[0], 1), "at most 0"),
        (lambda manager: manager.truncate(manager.open()[0], 1), "at most 0"),
    ],
)
def test_a_wrong_argument_raises_an_error_that_names_it(act, message: str):
    with pytest.raises(CacheError, match=message):
        act(BlockManager(4, 2))
