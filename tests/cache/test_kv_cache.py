"""KVCache: the rows of a slot's heads in the pools, growth, and copies of slots."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from index_cases import assert_same_bits

from mlx_transmuter.cache import CacheError, CacheIndex, KVCache, PoolSpec

POOL_SPECS = [PoolSpec(3, 2, mx.float32), PoolSpec(1, 5, mx.float16)]


def random_values(rng: np.random.Generator, slots: int) -> list[mx.array]:
    """Values [slots, heads, width] for each pool."""
    shapes = [(slots, spec.heads, spec.width) for spec in POOL_SPECS]
    return [mx.array(rng.normal(size=shape)).astype(spec.dtype) for shape, spec in zip(shapes, POOL_SPECS, strict=True)]


@pytest.mark.parametrize("block_size", [1, 4])
def test_slots_have_the_same_values_after_the_cache_has_grown(block_size):
    kv_cache, rng = KVCache(POOL_SPECS, 0, block_size), np.random.default_rng(block_size)
    kv_cache.grow(8)
    slots = rng.permutation(8)
    values = random_values(rng, 8)
    kv_cache.write_slots(slots, values)
    for num_slots in (8, 12, 40):
        kv_cache.grow(num_slots)
        assert [pool.shape[0] for pool in kv_cache.pools.arrays] == [3 * num_slots + 1, num_slots + 1]
        for read, written in zip(kv_cache.read_slots(slots), values, strict=True):
            np.testing.assert_array_equal(np.array(read), np.array(written))
    with pytest.raises(CacheError, match="at least 40"):
        kv_cache.grow(36)


def test_an_index_reads_the_same_values_after_the_cache_has_grown():
    kv_cache = KVCache([PoolSpec(3, 5, mx.float32)], 8)
    values = np.random.default_rng(6).standard_normal((3, 2, 5)).astype(np.float32)
    index = CacheIndex.make([[0, 1]], [[6, 3]])
    writing = index.for_heads(3, kv_cache.head_span).with_spare_pool_row(3 * 8)
    kv_cache.pools.put([writing.write(values, pool) for pool in kv_cache.pools.take()])
    kv_cache.grow(16)
    assert_same_bits(index.for_heads(3, kv_cache.head_span).read(kv_cache.pools.arrays[0]), values)
    new_slots = [slot for slot in range(16) if slot not in (6, 3)]
    assert not np.array(kv_cache.read_slots(new_slots)[0]).any()


def test_growing_allocates_one_grown_pool_beside_the_old_ones():
    slots, width = 200_000, 8
    kv_cache = KVCache([PoolSpec(1, width, mx.float32)] * 3, slots)
    kv_cache.pools.evaluate()
    nbytes = slots * width * 4
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    kv_cache.grow(2 * slots)
    assert mx.get_peak_memory() - before < 4 * nbytes + 2 * nbytes + 65536
    assert mx.get_active_memory() - before < 3 * nbytes + 65536


@pytest.mark.parametrize(("block_size", "contiguous_stride"), [(1, None), (4, None), (4, 4)])
def test_each_slot_and_head_has_a_row_of_its_own_and_the_rows_of_a_head_are_adjacent(block_size, contiguous_stride):
    kv_cache = KVCache(POOL_SPECS, 12, block_size, contiguous_stride=contiguous_stride)
    rows = kv_cache.pool_rows(np.arange(12), 3).reshape(3, 12)
    assert sorted(rows.reshape(-1)) == list(range(36))  # none is the last, the spare one
    assert (np.diff(rows.reshape(3, -1, kv_cache.head_span), axis=2) == 1).all()
    assert kv_cache.head_span == (contiguous_stride or 12)


def test_the_accepted_tokens_of_a_draft_follow_the_sequence_in_blocks_of_any_size():
    """In blocks of one in their slots, in larger blocks as copies; a padding row's draft ends too."""
    for block_size, copied in ((1, 0), (2, 2)):
        kv_cache = KVCache([PoolSpec(3, 2, mx.float32)] * 2, 16, block_size)
        sequence = kv_cache.block_manager.open()[0]
        kv_cache.append(sequence, 3)
        free = kv_cache.block_manager.free_slots
        drafts = kv_cache.open_drafts([4, 0])
        values = mx.array(np.random.default_rng(1).normal(size=(4, 3, 2)).astype(np.float32))
        kv_cache.write_slots(kv_cache.block_manager.slots_of(drafts[0], 0, 4), [values, values])
        kv_cache.accept_drafts([sequence, None], drafts, [[1, 3], []])
        assert kv_cache.block_manager.length(sequence) == 5
        assert kv_cache.copied_slots == copied
        for read in kv_cache.read_slots(kv_cache.block_manager.slots_of(sequence, 3, 5)):
            np.testing.assert_array_equal(np.array(read), np.array(values)[[1, 3]])
        assert kv_cache.block_manager.free_slots == free - 2
