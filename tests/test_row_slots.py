"""How many slots the rows of a session reserve: what they can have at a time, and a prompt that rows share once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_transmuter.cache import CacheFullError, KVCache
from mlx_transmuter.runtime.buckets import Ring
from mlx_transmuter.runtime.row_slots import RowSlots, most_blocks_of_rows


def run_rows(
    prompts: list[int],
    width: int,
    new: list[int],
    block: int,
    ring: Ring | None,
    num_slots: int,
    beams: np.random.Generator | None,
) -> int:
    """Runs rows that fork from the prompts, and then grow by new[r] tokens; as beams they also continue one another.
    Returns the most slots that they had. Raises CacheFullError where num_slots are too few."""
    kv_cache = KVCache((), num_slots, block, max_slots=num_slots)
    rows = len(prompts) * width
    slots = RowSlots(kv_cache, [kv_cache.block_manager.open()[0] for _ in range(rows)], ring, paged=True)
    lengths, peak = np.zeros(rows, np.int32), 0

    def step(counts: np.ndarray) -> None:
        nonlocal lengths, peak
        slots.free_unreachable(lengths)
        slots.reserve(counts)
        lengths = lengths + counts
        slots.append(counts, lengths)
        peak = max(peak, kv_cache.block_manager.num_slots - kv_cache.block_manager.free_slots)

    is_first = np.arange(rows) % width == 0
    targets = np.repeat(prompts, width) * is_first
    while (lengths < targets).any():
        step(np.minimum(targets - lengths, ring.max_step_tokens if ring else 10**6))
    slots.fork([row // width * width for row in range(rows)])
    lengths = np.repeat(prompts, width)
    for place in range(max(new)):
        if beams is not None:
            parents = [row // width * width + int(beams.integers(width)) for row in range(rows)]
            slots.fork(parents)
        step(np.array([int(place < count) for count in new], np.int32))
    return peak


@given(
    prompts=st.lists(st.sampled_from([1, 6, 7, 25, 40]), min_size=1, max_size=2),
    width=st.integers(1, 4),
    new=st.lists(st.sampled_from([0, 1, 2, 3, 13, 30]), min_size=8, max_size=8),
    is_beam_search=st.booleans(),
    block=st.sampled_from([1, 2, 5]),
    ring=st.sampled_from([None, Ring(3, 6), Ring(8, 12)]),
    seed=st.integers(0, 99),
)
def test_rows_that_fork_find_the_slots_that_are_reserved(prompts, width, new, is_beam_search, block, ring, seed):
    rows = len(prompts) * width
    new = [new[0] if is_beam_search else new[row] for row in range(rows)]
    max_lengths = [prompts[row // width] + new[row] for row in range(rows)]
    forked_lengths = [prompts[row // width] if row % width else 0 for row in range(rows)]
    reserved = most_blocks_of_rows(max_lengths, forked_lengths, ring, block) * block
    beams = np.random.default_rng(seed) if is_beam_search else None
    peak = run_rows(prompts, width, new, block, ring, reserved, beams)
    assert peak <= reserved
    if ring is None and not is_beam_search:
        assert peak == reserved
        with pytest.raises(CacheFullError, match=f"at most {reserved - block}"):
            run_rows(prompts, width, new, block, ring, reserved - block, beams)


def test_eight_texts_of_one_prompt_reserve_it_once():
    """401 tokens, and 10 more of each text: 481 slots, of which there are a power of two."""
    max_lengths, forked_lengths = [411] * 8, [0] + [401] * 7
    assert most_blocks_of_rows(max_lengths, forked_lengths, None, 1) == 401 + 8 * 10
    slots = RowSlots.allocate((), max_lengths, None, 1, forked_lengths)
    assert slots.kv_cache.block_manager.num_slots == 512
