"""Store: where the heads of a slot lie in its pools, and what stays when there are more slots."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_transmuter.cache import KVCache, PoolSpec

POOL_SPECS = [PoolSpec(3, 2, mx.float32), PoolSpec(1, 5, mx.float16)]


def slot_values(store: KVCache, slots: np.ndarray) -> list[np.ndarray]:
    """What each pool holds at the slots, [slots, heads, width]."""
    return [
        np.array(pool)[store.pool_rows(slots, kind.heads)].reshape(kind.heads, len(slots), kind.width).swapaxes(0, 1)
        for pool, kind in zip(store.pools.arrays, store.pool_specs, strict=True)
    ]


@pytest.mark.parametrize("block", [1, 4])
def test_slots_keep_what_they_hold_when_there_are_more(block):
    store, draw = KVCache(POOL_SPECS, 0, block), np.random.default_rng(block)
    store.grow(8)
    slots = draw.permutation(8)
    values = [draw.normal(size=(8, kind.heads, kind.width)).astype(np.float16) for kind in POOL_SPECS]
    store.write_slots(
        slots, [mx.array(value).astype(kind.dtype) for value, kind in zip(values, POOL_SPECS, strict=True)]
    )
    for more in (8, 12, 40):
        store.grow(more)
        assert [pool.shape[0] for pool in store.pools.arrays] == [3 * more + 1, more + 1]
        for found, wanted in zip(slot_values(store, slots), values, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("block", "run"), [(1, None), (4, None), (4, 4)])
def test_the_rows_of_a_head_lie_together_and_no_two_are_one(block, run):
    store = KVCache(POOL_SPECS, 12, block, run_slots=run)
    rows = store.pool_rows(np.arange(12), 3).reshape(3, 12)
    assert sorted(rows.reshape(-1)) == list(range(36))  # none is the last, the spare one
    assert (np.diff(rows.reshape(3, -1, store.head_span), axis=2) == 1).all()
    assert store.head_span == (run or 12)
