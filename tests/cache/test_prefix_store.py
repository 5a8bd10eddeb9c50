"""Prefix sharing: which stored blocks later prompts find, and in which order they are evicted."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_transmuter.cache import BlockManager, CacheError


def run_prompt(manager: BlockManager, tokens: list[int]) -> int:
    """Opens a prompt, appends its tokens and stores its blocks; returns the sequence."""
    sequence, stored = manager.open(tokens)
    manager.append(sequence, tokens[stored:])
    manager.store_prefix(sequence)
    return sequence


def test_an_append_can_get_every_slot_without_a_user():
    """Also the last of those of stored blocks."""
    manager = BlockManager(12, 3)
    manager.free(run_prompt(manager, list(range(7))))
    assert manager.free_slots == 12
    sequence, _ = manager.open()
    manager.append(sequence, 12)
    assert sorted(manager.table([sequence], 12)[0].tolist()) == list(range(12))
    assert manager.free_slots == 0


def test_the_least_recently_used_prompt_is_evicted_first_and_its_end_before_its_beginning():
    manager = BlockManager(8, 2)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    manager.free(run_prompt(manager, first))
    manager.free(run_prompt(manager, second))
    sequence, stored = manager.open([*first, 0])  # so the second is now the least recently used
    assert stored == 4
    manager.free(sequence)
    other, _ = manager.open()
    manager.append(other, 2)
    assert [manager.open([*tokens, 0])[1] for tokens in (first, second)] == [4, 2]


def test_storing_a_stored_prefix_again_counts_as_a_use():
    """A prompt's last block is never found, so it runs again in a slot of its own; all its blocks were used."""
    manager = BlockManager(8, 2)
    first, second = [1, 2, 3, 4], [5, 6]
    manager.free(run_prompt(manager, first))
    manager.free(run_prompt(manager, second))
    manager.free(run_prompt(manager, first))
    other, _ = manager.open()
    manager.append(other, 4)
    assert [manager.match_prefix([*tokens, 0]) for tokens in (first, second)] == [4, 0]


def test_token_ids_may_be_named_when_a_prefix_is_stored():
    manager = BlockManager(8, 2)
    sequence, _ = manager.open()
    manager.append(sequence, 5)
    manager.store_prefix(sequence)
    assert manager.stored_blocks() == []
    manager.store_prefix(sequence, [1, 2, 3])
    prompts = ([1, 2, 3, 4, 5], [1, 2, 9], [1, 2], [2, 1, 3])
    assert [manager.match_prefix(tokens) for tokens in prompts] == [2, 2, 0, 0]
    manager.store_prefix(sequence, np.array([1, 2, 3, 4, 5]))
    assert manager.match_prefix([1, 2, 3, 4, 5]) == 4
    with pytest.raises(CacheError, match="at most the sequence's 5"):
        manager.store_prefix(sequence, [1] * 6)


@pytest.mark.parametrize(
    "blocks",
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
def test_wrong_blocks_are_refused_and_none_of_them_is_stored(blocks):
    manager = BlockManager(6, 2)
    with pytest.raises(CacheError, match=r"BlockManager\.restore"):
        manager.restore_blocks(blocks)
    assert (manager.stored_blocks(), manager.free_slots, manager.evictable_slots) == ([], 6, 0)


def test_tokens_whose_hashes_collide_are_not_confused():
    """hash(2**61 - 1) is hash(0) in CPython: the tokens are compared, and so is the whole prefix before them."""
    big = 2**61 - 1
    assert hash((0, (0, 1))) == hash((0, (big, 1)))
    manager = BlockManager(16, 2)
    run_prompt(manager, [0, 1, 3, 4])
    assert manager.open([big, 1, 3, 4, 9])[1] == 0
    run_prompt(manager, [big, 1, 5, 6])
    assert manager.open([0, 1, 5, 6, 9])[1] == 2
    assert manager.open([big, 1, 5, 6, 9])[1] == 4


def test_blocks_after_an_evicted_one_are_removed_with_it_and_can_be_stored_again():
    """Their prefix can no longer be found, so neither can they, though a sequence still has them."""
    manager = BlockManager(5)
    second, _ = manager.open()  # opened before the first is stored: it has a slot of its own for their common token
    first = run_prompt(manager, [1, 2])
    manager.append(second, [1, 3])
    manager.store_prefix(second)
    manager.free(first)
    other, _ = manager.open()
    manager.append(other, 3)  # takes the first's blocks; the second's last block followed the first of them
    assert manager.open([1, 3, 0])[1] == 0
    manager.store_prefix(second)
    assert manager.open([1, 3, 0])[1] == 2


def test_a_stored_block_is_never_written():
    """Not even by the sequence it came from, its only user, once that is truncated into the block."""
    manager = BlockManager(16, 4)
    sequence = run_prompt(manager, [1, 2, 3, 4])
    old = manager.table([sequence], 4)[0]
    manager.truncate(sequence, 2)
    copies = manager.append(sequence, [7, 8])
    new = manager.table([sequence], 4)[0]
    assert copies == [(old[0], new[0]), (old[1], new[1])]
    assert not set(old) & set(new)
