"""Pools: what a step may do with them, and the memory of a write, which does not depend on the number of slots."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from index_cases import assert_same_bits

from mlx_transmuter.cache import CacheError, CacheIndex, Pools

FEW, MANY = 2_000, 200_000
WIDTH = 8

# The memory of a write depends on the call's tokens, not on the slots


def contiguous_index(slots: int, dropped: bool) -> CacheIndex:
    index = CacheIndex.rows(slots // 2, [3, 0]).limit_context(64).window(5)
    return index if not dropped else CacheIndex.from_walk(index.walk()[0], [index.walk()[1][0] - 9, index.walk()[1][1]])


def index_of_blocks(slots: int, dropped: bool) -> CacheIndex:
    """Two of four tokens are dropped: a padding token, and one whose column has no slot."""
    table = np.array([[slots - 1, 4, 9, 17], [3, 7, slots // 2, -1]])
    return CacheIndex.make([[-1, 2], [1, 3]] if not dropped else [[-1, 4], [-2, 3]], table)


def shared_sequence_index(slots: int, dropped: bool) -> CacheIndex:
    index = CacheIndex.make([[1], [2]], [[5, slots - 2, 8]], row=[0, 0] if not dropped else [-1, 1])
    return index.select([[[0, 1, 9]], [[2, 1, 0]]])


def heads_index(slots: int, dropped: bool) -> CacheIndex:
    return index_of_blocks(slots // 4, dropped).for_heads(4, 50)


def draft_index(slots: int, dropped: bool) -> CacheIndex:
    tree = [[slots - 3, 2]] if not dropped else [[-1, slots]]
    return CacheIndex.make([[2, 3]], [[0, slots // 3, -1]]).draft(tree, [[[True, False], [True, True]]])


def every_index(slots: int, dropped: bool) -> CacheIndex:
    at = [[3, 4]] if not dropped else [[4, 5]]
    return CacheIndex.make(at, [[0, 1, 2, 3, 4]], every=[(4, [[slots - 1, 6]])]).every(4)


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("dropped", [False, True], ids=["stored", "all dropped"])
@pytest.mark.parametrize(
    "make_index", [contiguous_index, index_of_blocks, shared_sequence_index, heads_index, draft_index, every_index]
)
def test_a_compiled_step_needs_no_more_memory_for_more_slots(make_index, dropped: bool):
    """A step that writes and reads the keys and values of a layer allocates only what its few tokens need."""
    extra = {}
    for slots in (FEW, MANY):
        index = make_index(slots, dropped)
        signature, leaves = index.walk()

        @mx.compile
        def step(pools, leaves, values, signature=signature):
            index = CacheIndex.from_walk(signature, leaves)
            (seen_keys, keys), (seen_values, stored_values) = (index.extend(values, pool) for pool in pools)
            return [seen_keys.sum(), seen_values.sum()], [keys, stored_values]

        shape = (slots, WIDTH)
        pools = Pools([mx.full(shape, i, mx.float32) for i in (1, 2)])
        pools.evaluate()
        values = mx.ones((index.batch, index.seq, WIDTH))
        mx.eval(leaves, values)
        peak = 0
        for _ in range(4):
            gc.collect()
            mx.synchronize()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            out, new = step(pools.take(), leaves, values)
            pools.put(new)
            pools.evaluate(*out)
            peak = max(peak, mx.get_peak_memory() - before)
            del out
        extra[slots] = peak
        size = slots * WIDTH * 4
        before = np.repeat(np.float32([[1], [2]])[..., None], slots, axis=1)
        changed = [np.array(pool) != old for pool, old in zip(pools.arrays, before, strict=True)]
        assert sum(c.sum() for c in changed) == (0 if dropped else _num_written_rows(make_index) * WIDTH)
    step_size = 2 * WIDTH * 4 * index.batch * (index.seq + 64)
    assert extra[MANY] < 8 * step_size < size / 4
    assert extra[MANY] < extra[FEW] + step_size


def _num_written_rows(make_index) -> int:
    """How many rows of the second pool the tokens change (the first pool already has ones, which the tokens store)."""
    return {
        contiguous_index: 3,
        index_of_blocks: 2,
        shared_sequence_index: 2,
        heads_index: 8,
        draft_index: 2,
        every_index: 1,
    }[make_index]


def test_a_copy_of_rows_is_made_in_place():
    pools = Pools([mx.full((MANY, WIDTH), i, mx.float32) for i in range(3)])
    pools.evaluate()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pools.copy_pool_rows([0, 1], [5, MANY - 1])
    assert mx.get_peak_memory() - before < 65536


# Taken and put back


def two_pools() -> Pools:
    return Pools([mx.zeros((4, 2)), mx.ones((4, 3), mx.float16)])


def test_pools_can_be_put_back_after_a_step():
    pools = two_pools()
    pools.put([pool + 1 for pool in pools.take()])
    pools.evaluate()
    assert_same_bits(pools.arrays[0], np.ones((4, 2), np.float32))
    assert_same_bits(pools.arrays[1], np.full((4, 3), 2, np.float16))
    assert len(pools) == 2


@pytest.mark.parametrize(
    "use", [Pools.take, Pools.evaluate, lambda pools: pools.arrays, lambda pools: pools.copy_pool_rows([0], [1])]
)
def test_the_error_of_pools_that_were_taken_shows_the_right_code(use):
    pools = two_pools()
    pools.take()
    with pytest.raises(CacheError, match=r"Wrong: .*Right: new = step\(pools\.take\(\), x\)") as raised:
        use(pools)
    assert "given away" in raised.value.found
    assert "new pools" in raised.value.do


def test_a_failed_step_leaves_no_pools():
    pools = two_pools()

    def step(arrays):
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        pools.put(step(pools.take()))
    with pytest.raises(CacheError, match="given away"):
        pools.take()


def test_a_failed_evaluation_leaves_no_pools(monkeypatch):
    pools = two_pools()

    def broken(*arrays):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "eval", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        pools.evaluate()
    with pytest.raises(CacheError, match="given away"):
        pools.take()


def test_put_refuses_pools_that_something_still_refers_to():
    """A reference to the list, to one array, or to the arrays that made the pools would make the write a copy."""
    first = mx.zeros((4, 2))
    pools = Pools([first])
    with pytest.raises(CacheError, match=r"references to the old pools \[0\]"):
        pools.put([pool + 1 for pool in pools.take()])
    pools = two_pools()
    taken = pools.take()
    with pytest.raises(CacheError, match=r"references to the old pools \[0, 1\]"):
        pools.put([pool + 1 for pool in taken])
    pools = two_pools()
    second = pools.arrays[1]
    with pytest.raises(CacheError, match=r"references to the old pools \[1\]"):
        pools.put([pool + 1 for pool in pools.take()])
    assert_same_bits(second, np.ones((4, 3), np.float16))


def test_put_empties_the_list_of_new_pools():
    """So that the caller's list does not refer to the new pools at the next step."""
    pools = two_pools()
    for _ in range(2):
        new = [pool + 1 for pool in pools.take()]
        pools.put(new)
        assert new == []


def test_a_step_may_return_a_pool_unchanged():
    pools = two_pools()
    pools.put(pools.take())
    assert_same_bits(pools.arrays[0], np.zeros((4, 2), np.float32))


def test_put_refuses_pools_that_were_not_taken_or_differ_in_shape():
    pools = two_pools()
    with pytest.raises(CacheError, match="not taken"):
        pools.put([mx.zeros((4, 2)), mx.ones((4, 3), mx.float16)])
    for new in (
        [mx.zeros((4, 2))],
        [mx.zeros((5, 2)), mx.ones((4, 3), mx.float16)],
        [mx.zeros((4, 2)), mx.ones((4, 3))],
    ):
        pools = two_pools()
        pools.take()
        with pytest.raises(
            CacheError, match=r"\[4, 2\] mlx\.core\.float32, \[4, 3\] mlx\.core\.float16, as they were taken"
        ):
            pools.put(new)


@pytest.mark.usefixtures("compiling")
def test_an_evaluation_without_waiting_does_not_copy():
    """evaluate(wait=False) returns early; the next one waits first, so that no write meets an unfinished read."""
    index = CacheIndex.make([[1]], [[5, 3]])
    signature, leaves = index.walk()

    @mx.compile
    def step(pools, leaves, values):
        seen, pool = CacheIndex.from_walk(signature, leaves).extend(values, pools[0])
        return seen.sum() + mx.matmul(mx.ones((64, 64)), mx.ones((64, 64))).sum(), [pool]

    pools = Pools([mx.zeros((MANY, WIDTH))])
    pools.evaluate()
    values = mx.ones((1, 1, WIDTH))
    mx.eval(leaves, values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(10):
        out, new = step(pools.take(), leaves, values)
        pools.put(new)
        pools.evaluate(out, wait=False)
    assert out.item() == WIDTH + 64**3
    assert mx.get_peak_memory() - before < MANY * WIDTH


def test_copy_pool_rows_copies_rows_of_each_pool():
    pools = Pools([mx.arange(5, dtype=mx.int32), mx.arange(10, dtype=mx.float32).reshape(5, 2)])
    pools.copy_pool_rows([0, 4], [3, 1])
    assert_same_bits(pools.arrays[0], np.int32([0, 4, 2, 0, 4]))
    assert_same_bits(pools.arrays[1][:, 0], np.float32([0, 8, 4, 0, 8]))
    pools.copy_pool_rows([], [])
    with pytest.raises(CacheError, match="target_pool_rows"):
        pools.copy_pool_rows([0], [1, 2])


def test_dropped_pools_cannot_be_taken_and_can_be_dropped_again():
    pools = Pools([mx.zeros((4, 2))])
    pools.drop()
    pools.drop()
    with pytest.raises(CacheError, match="given away"):
        pools.take()
